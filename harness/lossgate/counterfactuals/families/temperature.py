# SPDX-License-Identifier: Apache-2.0
"""The temperature: ignored, applied twice, late, in forward or backward alone."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from torch import Tensor

from lossgate.counterfactuals.counterfactual import Counterfactual, mistake, tempered
from lossgate.counterfactuals.seams import Outputs, with_gradient_of
from lossgate.counterfactuals.setting import Setting
from lossgate.specs.spec import Spec
from lossgate.specs.token_values import TokenValues


def temperatures(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of the temperature."""
    if spec.temperature is None or head not in ("hidden", "logits"):
        return
    powers = {"ignored": 0, "applied twice": 2, "multiplied in place of divided": -1}
    for what, power in powers.items():
        both = partial(_to_power, power)
        yield mistake(f"temperature {what}", f"the temperature is {what}", "temperature", tempered, temper=both)
        yield mistake(
            f"temperature {what} in backward",
            f"the temperature is {what} in backward",
            "temperature",
            tempered,
            temper=partial(_backward_power, power),
        )
        yield mistake(
            f"temperature {what} in forward",
            f"the temperature is {what} in forward, and right in backward",
            "temperature",
            tempered,
            temper=partial(_forward_power, power),
        )
    for what, whole in (("rounded", round), ("cut", int)):
        yield mistake(
            f"temperature {what} to a whole number",
            f"the temperature is {what} to a whole number",
            "temperature",
            partial(_is_broken, whole),
            "keep it as a float",
            temper=partial(_whole_temperature, whole),
        )
    if spec.reference is not None:
        for what, power in _FACTORS.items():
            yield mistake(
                f"outputs {what}",
                f"{{outputs}}: {what}",
                "temperature",
                tempered,
                outputs=partial(_times_power, power),
            )
    for name in ("logprobs", "entropy", "logsumexp"):
        if name in spec.uses:
            yield mistake(
                f"{name} divided by the temperature",
                f"{name} is divided by the temperature, which belongs to the logits",
                "temperature",
                tempered,
                values=partial(_divided_values, name),
            )
            yield mistake(
                f"{name} divided by the temperature in place of the logits",
                f"{name} is divided by the temperature, and the logits are not",
                "temperature",
                tempered,
                temper=lambda setting, z: z,
                values=partial(_divided_values, name),
            )


_FACTORS: Mapping[str, int] = {
    "multiplied by the temperature squared": 2,
    "divided by the temperature squared": -2,
}


def _times_power(power: int, setting: Setting, outputs: Outputs) -> Outputs:
    factor = setting.temperature**power
    return {output: x if output.kind == "metric" else factor * x for output, x in outputs.items()}


def _is_broken(whole: Callable[[float], int], setting: Setting) -> bool:
    """Returns whether a temperature is another one as a whole number, and that is not 0."""
    return setting.head.has_logits and whole(setting.temperature) not in (0, setting.temperature)


def _whole_temperature(whole: Callable[[float], int], setting: Setting, z: Tensor) -> Tensor:
    return z / whole(setting.temperature)


def _to_power(power: int, setting: Setting, z: Tensor) -> Tensor:
    return z / setting.temperature**power


def _backward_power(power: int, setting: Setting, z: Tensor) -> Tensor:
    return with_gradient_of(z / setting.temperature, z / setting.temperature**power)


def _forward_power(power: int, setting: Setting, z: Tensor) -> Tensor:
    return with_gradient_of(z / setting.temperature**power, z / setting.temperature)


def _divided_values(name: str, setting: Setting, values: TokenValues) -> TokenValues:
    return values.replace(**{name: values.given[name] / setting.temperature})
