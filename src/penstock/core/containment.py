"""Contains an unexpected exception that concerns one request: it ends this request, not the engine."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from penstock.utils.errors import OverloadedError, RequestError, RequestFailedError
from penstock.utils.logging import get_logger

logger = get_logger(__name__)


@contextmanager
def contained(request_id: str, may_refuse: bool = True) -> Generator[None]:
    """Raises RequestFailedError in place of an unexpected exception, which it logs with its traceback.

    Only for code that leaves the scheduler's state consistent when it raises. The message, which clients see, has no
    details; but with `may_refuse` false it is that of a RequestError or OverloadedError, which else passes.
    """
    try:
        yield
    except (RequestError, OverloadedError) as error:
        raise error if may_refuse else RequestFailedError(str(error)) from None
    except Exception as error:
        logger.exception("request %s has failed, and the engine continues", request_id)
        raise RequestFailedError("the engine failed on this request; its log says why") from error
