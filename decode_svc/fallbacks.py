"""Why a prompt is computed again although a prefill worker has computed it."""

import logging
from enum import StrEnum

from mesh import metrics

logger = logging.getLogger(__name__)


class Fallback(StrEnum):
    """What became of the KV that was there."""

    LAYOUT_MISMATCH = "layout_mismatch"
    INCOMPLETE = "incomplete"
    LEASE_EXPIRED = "lease_expired"
    HOLDER_UNREACHABLE = "holder_unreachable"
    PULL_FAILED = "pull_failed"


class ComputeHere(Exception):
    """Other workers' KV is of no use to the request any more."""


def count_fallback(fallback: Fallback) -> None:
    metrics.KV_TRANSFER_FAILURES.add(1, {"reason": fallback.value})
    logger.warning("KV is computed again", extra={"reason": fallback.value})
