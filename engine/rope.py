"""The rotary frequencies of a model, and the angles' cosines and sines."""

import math

import numpy as np
import numpy.typing as npt

from engine.config import LinearRopeScaling, Llama3RopeScaling, RopeScaling

Float32Array = npt.NDArray[np.float32]


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> Float32Array:
    """Return the angle per position of each pair of dimensions."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # Rounded after each operation, as the reference implementations in float32 are.
    powers = np.power(theta, exponents.astype(np.float64)).astype(np.float32)
    frequencies: Float32Array = np.float32(1) / powers
    match scaling:
        case None:
            return frequencies
        case LinearRopeScaling(factor):
            return frequencies / np.float32(factor)
        case Llama3RopeScaling():
            return _stretch(frequencies, scaling)


def rotary_tables(
    frequencies: Float32Array, num_positions: int
) -> tuple[Float32Array, Float32Array]:
    """Return cosine and sine, `[num_positions, head_dim / 2]` each."""
    # Angles are float32 products, like everybody's; what is taken of them is exact.
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * frequencies
    exact = angles.astype(np.float64)
    return np.cos(exact).astype(np.float32), np.sin(exact).astype(np.float32)


def _stretch(frequencies: Float32Array, scaling: Llama3RopeScaling) -> Float32Array:
    """Divide low frequencies by the factor, keep high ones, and blend in between."""
    turns = scaling.original_max_position_embeddings * frequencies / np.float32(2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    stretched: Float32Array = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    return stretched
