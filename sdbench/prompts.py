"""Questions, and whole exchanges, as token ids by a model's own chat template."""

from typing import Any

from sdbench.errors import SdbenchError, UsageError


def encode_question(tokenizer: Any, question: str) -> list[int]:
    """Token ids of a question alone, as the user's message, up to where the assistant's answer begins.

    Raises:
        SdbenchError: No tokenizer.
        UsageError: One without a chat template.
    """
    return _render(tokenizer, [{"role": "user", "content": question}], add_generation_prompt=True)


def encode_reference(tokenizer: Any, question: str, answer: str) -> list[int]:
    """Token ids of the whole exchange, the question and the reference answer in the assistant's place.

    Raises:
        SdbenchError: No tokenizer.
        UsageError: One without a chat template.
    """
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return _render(tokenizer, messages, add_generation_prompt=False)


def _render(tokenizer: Any, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> list[int]:
    if tokenizer is None:
        raise SdbenchError("this model has no tokenizer (random weights): it can be timed, but not asked questions")
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(f"the tokenizer of {tokenizer.name_or_path!r} has no chat template: choose an instruction-tuned model")
    # transformers 5 returns a dict of ids and mask unless told otherwise.
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False))
