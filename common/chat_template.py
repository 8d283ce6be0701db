"""Chat messages -> text, by the checkpoint's own Jinja template, sandboxed: a template is code from somebody else.

The environment offers what transformers' `apply_chat_template` offers, so that templates written for it render alike.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from common.errors import ConfigError, InvalidRequestError
from common.model_facts import read_json

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """One model's template. Stateless; safe to use from any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile `source`.

        Raises:
            ConfigError: it is not a Jinja template.
        """
        self.source = source
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
            """What it reads of what it is given."""
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the model's chat template, line {error.lineno}: {error.message}") from error

    @classmethod
    def load(cls, model_dir: Path) -> "ChatTemplate | None":
        """Read the template of a model folder; None if it has none.

        Raises:
            ConfigError: a file is broken.
        """
        path = model_dir / "tokenizer_config.json"
        settings = read_json(path) if path.exists() else {}
        source = _source(model_dir, settings)
        return None if source is None else cls(source, _special_tokens(settings))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **extra: Any,
    ) -> str:
        """Return the prompt.

        Args:
            messages: `role` and `content` of each, and whatever else the template knows.
            add_generation_prompt: end with the beginning of the assistant's turn.
            continue_final_message: end with the last message's text instead, which is to be continued.
            extra: further variables of the template, e.g. `tools`; whatever a client calls them, `self` too.

        Raises:
            InvalidRequestError: the template refuses these messages, in its own words.
        """
        variables: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens, **extra}
        variables["messages"] = messages
        variables["add_generation_prompt"] = add_generation_prompt and not continue_final_message
        try:
            prompt = self._template.render(variables)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            # A template meets input that its author did not think of as a Python error.
            raise InvalidRequestError(f"the model's chat template refuses these messages: {error}") from error
        return _up_to(prompt, str(messages[-1]["content"])) if continue_final_message else prompt


def _up_to(prompt: str, text: str) -> str:
    """Return a prompt up to the end of the last message's text, of which templates may drop the space around it."""
    start = prompt.rfind(text.strip())
    if not text.strip() or start < 0:
        raise InvalidRequestError("continue_final_message must have a last message whose text the template shows")
    whole = text.lstrip()
    return prompt[:start] + (whole if prompt.startswith(whole, start) else text.strip())


def _source(model_dir: Path, settings: dict[str, Any]) -> str | None:
    path = model_dir / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
    source = settings.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if source is not None and not isinstance(source, str):
        raise ConfigError(f"{model_dir / 'tokenizer_config.json'}: chat_template must be text")
    return source


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _SPECIAL_TOKENS:
        value = settings.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    # The plain `dict` and `namespace` would give access to Python's internals.
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; for serving it means nothing."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _Dict:
    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
