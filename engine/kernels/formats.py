"""Names of the weight and KV formats, with the numbers that the C interface gives them."""

from enum import IntEnum

# Inputs that share a scale in the grouped formats, and in every quantized activation.
GROUP_SIZE = 32
# Output channels that are packed together; threads share whole units.
UNIT_SIZE = 32


class WeightFormat(IntEnum):
    """How a matrix is stored; the integer formats multiply int8 activations."""

    FLOAT32 = 0
    BFLOAT16 = 1
    # One scale per output channel.
    INT8 = 2
    # One float16 scale per output channel and 32 inputs, as GGUF's Q8_0.
    INT8_GROUPED = 3
    # A float16 scale and minimum per output channel and 32 inputs, as GGUF's Q4_1.
    INT4 = 4
    # INT4's codes in memory; what is multiplied are the INT8 weights that they round to.
    INT4_CHANNEL = 5

    @classmethod
    def from_name(cls, name: str) -> "WeightFormat":
        return cls[name.upper()]


class KvFormat(IntEnum):
    """How keys and values are stored; the 8-bit ones carry a float32 scale per token and head."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    FP8_E4M3 = 3

    @classmethod
    def from_name(cls, name: str) -> "KvFormat":
        return cls[name.upper()]
