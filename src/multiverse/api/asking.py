"""What users may ask the daemon without being its operators: about their own jobs, and what would start.

On a Unix socket one line of JSON with a `Question`, which the daemon answers with one line: the answer as of the API's
route of the same name, or `{"error": …, "hint": …, "status": …}`. Over TCP the line is `{"credential": …}`: a munge
credential whose payload is the question with its `purpose`, so that a credential is good for this question only, once,
and for no other service.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from multiverse.api.requests import TrialRequest

PURPOSE = "multiverse-question-1"
"""What credentials that carry questions are made for."""

LONGEST_QUESTION = 16 * 1024
"""Bytes of one line."""

JOB = r"^([0-9]{1,10}(_[0-9]{1,10})?)?$"


class Question(BaseModel):
    """`explain` and `timeline` ask about a `job`, `trial` about a `request`, and `capacity` about nothing further."""

    model_config = ConfigDict(extra="forbid")

    ask: Literal["explain", "timeline", "capacity", "trial"]
    job: str = Field(default="", pattern=JOB)
    request: TrialRequest | None = None
    purpose: str = Field(default="", max_length=64)
