"""Replies that the model gave elsewhere, where it is served or in an earlier run: read from JSON lines, and written as such."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import AliasChoices, Field, StrictBool, StrictInt, model_validator
from pydantic_core import PydanticCustomError

from sdbench.engine.greedy import position_limit
from sdbench.errors import SdbenchError
from sdbench.models import LoadedModel
from sdbench.results import strict_json, write_atomic
from sdbench.suites.data import Example, Record, read_records

if TYPE_CHECKING:
    from sdbench.suites.e2e.data import Question

REPLIES_FILE = "replies.jsonl"
FORM = 'each line is a JSON object with a text "question" and the model\'s "reply" to it, or that reply\'s token ids as "ids"'

ENDS = {"stop": True, "length": False}
"""An endpoint's ``finish_reason`` -> whether the model ended the reply by EOS."""


@dataclass(frozen=True)
class GivenReply:
    """A reply as a file has it.

    Attributes:
        where: File and line, for messages.
        text: Its text; None where there are ids.
        ids: Its token ids, which may end by EOS; None where there are none.
        ended: Whether the model ended it by EOS; None where the file doesn't say.
    """

    where: str
    text: str | None
    ids: tuple[int, ...] | None
    ended: bool | None

    def tokens(self, prompt_tokens: int, loaded: LoadedModel, longest: int) -> tuple[int, ...]:
        """Its token ids, EOS among them if the model ended it.

        Args:
            prompt_tokens: Length of the prompt.
            loaded: The model.
            longest: Tokens that will be used of it.

        Raises:
            SdbenchError: An id that the model lacks, EOS before the end or against what the file says, no token, too many positions.
        """
        known = self.ids if self.ids is not None else loaded.tokenizer(self.text, add_special_tokens=False, verbose=False).input_ids
        ids, vocabulary = tuple(known), loaded.model.config.get_text_config().vocab_size
        strange = next((token for token in ids if not 0 <= token < vocabulary), None)
        if strange is not None:
            raise SdbenchError(f"{self.where}: token id {strange}, and the model has {vocabulary}; take this model's own replies")
        if self.ended and not (ids and ids[-1] in loaded.eos_ids):
            ids = (*ids, _end(loaded))
        if not ids:
            raise SdbenchError(f"{self.where}: the reply has no token; leave the line out")
        if self.ended is False and ids[-1] in loaded.eos_ids:
            raise SdbenchError(f"{self.where}: the reply ends by EOS ({ids[-1]}), but is said to be cut off; correct one of the two")
        if early := next((place for place, token in enumerate(ids[:-1], start=1) if token in loaded.eos_ids), None):
            raise SdbenchError(
                f"{self.where}: token {early} of {len(ids)} is EOS ({ids[early - 1]}), after which no reply goes on; cut it there"
            )
        limit, positions = position_limit(loaded.model), prompt_tokens + min(len(ids), longest)
        if limit is not None and positions > limit:
            raise SdbenchError(
                f"{self.where}: prompt and reply are {positions} tokens, and the model has {limit} positions; leave the line out"
            )
        return ids


@dataclass(frozen=True)
class RepliedExample(Example):
    """A question with the model's own reply."""

    reply: GivenReply = field(kw_only=True)


class _Line(Record):
    question: str = Field(validation_alias=AliasChoices("question", "prompt"))
    reply: str | None = None
    ids: list[StrictInt] | None = Field(default=None, validation_alias=AliasChoices("ids", "token_ids"))
    eos: StrictBool | None = None
    finish_reason: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_sample(cls, line: Any) -> Any:
        if isinstance(line, dict) and "arm" in line and not {"question", "prompt"} & line.keys():
            raise PydanticCustomError(
                "sample",
                "an answer of an e2e run, whose questions are there to be judged and not to calibrate on; take the replies.jsonl of a "
                "'sdbench prune --run-directory'",
            )
        return line

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.ids is None and not (self.reply or "").strip():
            raise PydanticCustomError("reply", "neither a reply nor its ids")
        if self.finish_reason is not None and self.finish_reason not in ENDS:
            raise PydanticCustomError(
                "end", f"finish_reason {self.finish_reason!r} is no end of a reply (stop or length); leave the line out"
            )
        return self

    @property
    def ended(self) -> bool | None:
        """What the line says about EOS."""
        return self.eos if self.eos is not None else ENDS[self.finish_reason] if self.finish_reason is not None else None


def load_replies(path: Path) -> list[RepliedExample]:
    """Reads questions with the model's replies from JSON lines.

    A line has ``question`` (or ``prompt``), ``reply`` (text) or ``ids`` (or ``token_ids``; they count where both are there), and may have
    ``eos`` or an endpoint's ``finish_reason``, ``id``, and a reference ``answer``.

    Raises:
        SdbenchError: The file is missing, empty, not of that form (file, line and fault named), or repeats an id.
        UsageError: It says that it is a test split.
    """
    return [
        RepliedExample(
            name,
            line.question,
            line.answer,
            reply=GivenReply(where, line.reply if line.ids is None else None, None if line.ids is None else tuple(line.ids), line.ended),
        )
        for where, name, line in read_records(path, _Line, FORM)
    ]


def write_replies(path: Path, questions: "Sequence[Question]", ids: Mapping[int, Sequence[int]], loaded: LoadedModel) -> None:
    """Writes replies in the form that `load_replies` reads.

    Args:
        path: The file, which is replaced.
        questions: All questions.
        ids: Token ids of the replies, by the questions' numbers.
        loaded: The model that gave them.
    """
    lines = []
    for number, reply in sorted(ids.items()):
        question = questions[number]
        assert question.example is not None
        line = {"id": question.id, "question": question.example.question, "reply": loaded.tokenizer.decode(reply, skip_special_tokens=True)}
        line |= {"ids": list(reply), "eos": reply[-1] in loaded.eos_ids}
        lines.append(strict_json(line | ({"answer": question.example.answer} if question.example.answer is not None else {})) + "\n")
    write_atomic(path, "".join(lines))


def _end(loaded: LoadedModel) -> int:
    """The EOS token of the model's chat template, which is its tokenizer's; other ids that end a reply are rare."""
    own = loaded.tokenizer.eos_token_id
    return int(own) if own in loaded.eos_ids else min(loaded.eos_ids)
