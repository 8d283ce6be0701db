"""What clients ask and the model answers, in the log: only where the operator has switched it on."""

import logging
from collections.abc import Sequence

from common.logs import log
from common.text import Text

_LOG = logging.getLogger(__name__)


def complaint(characters_max: int) -> str | None:
    """Return what to warn of at the start; None: no text of any request is logged."""
    if not characters_max:
        return None
    return (
        f"gateway.log_texts_max={characters_max}: prompts and answers of ALL clients are written to the gateway's log; "
        "leave it out to keep them private"
    )


class TextsLog:
    """One line for each prompt and one for each answer, cut to `characters_max`; nothing at all if that is 0."""

    def __init__(self, text: Text, characters_max: int) -> None:
        self._text = text
        self._characters_max = characters_max
        if (warning := complaint(characters_max)) is not None:
            log(_LOG, logging.WARNING, warning)

    def prompt(self, request_id: str, tenant: str, token_ids: Sequence[int]) -> None:
        """Write a prompt as the model gets it, chat template included."""
        self._write("prompt", request_id, tenant, token_ids)

    def answer(self, request_id: str, tenant: str, token_ids: Sequence[int]) -> None:
        """Write what the model has said, calls and thinking included, when the request ends: also by an error."""
        self._write("answer", request_id, tenant, token_ids)

    def _write(self, event: str, request_id: str, tenant: str, token_ids: Sequence[int]) -> None:
        most = self._characters_max
        if not most:
            return
        text = self._text.decode(token_ids[:most], skip_special_tokens=False)  # few tokens have no character
        is_cut = len(token_ids) > most or len(text) > most
        shown = repr(text[:most]) + " ..." * is_cut  # so it stays on its line and tells a terminal nothing
        log(_LOG, logging.INFO, event, request_id=request_id, tenant=tenant, tokens=len(token_ids), text=shown)
