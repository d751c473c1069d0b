"""Chat messages to a prompt, through the model's own template."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from staticlm.errors import ArtifactError, Code, UsageError

Message = Mapping[str, Any]


def render_chat(
    template: str | None,
    messages: Sequence[Message],
    special: Mapping[str, str],
    generate: bool = True,
) -> str:
    """Render messages with a Hugging Face chat template, in a sandbox.

    Args:
        template: Jinja source.
        messages: Mappings with `role` and `content`.
        special: Special tokens by name, for example `bos_token`.
        generate: End with what introduces the assistant's answer.

    Raises:
        ArtifactError: There is no template, or it is malformed.
        UsageError: The messages are malformed, or the template refuses them.
    """
    if template is None:
        raise ArtifactError(
            Code.ARTIFACT_INVALID,
            "the artifact has no chat template",
            expected="chat_template.jinja, or chat_template in tokenizer_config.json",
            remedy="Pass a plain prompt.",
        )
    check_messages(messages)
    import jinja2
    from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

    try:
        compiled = _environment().from_string(template)
        text: str = compiled.render(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=generate,
            **special,
        )
        return text
    except (TemplateSyntaxError, SecurityError) as error:
        raise ArtifactError(
            Code.ARTIFACT_INVALID, "the chat template is malformed", found=str(error)[:200]
        ) from None
    except (TemplateError, jinja2.UndefinedError, TypeError, KeyError, ValueError) as error:
        raise UsageError(
            Code.USAGE,
            "the model's chat template refuses the messages",
            found=str(error)[:200],
            remedy="Check the order of the roles.",
        ) from None


def check_messages(messages: Sequence[Message]) -> None:
    """Refuse what is not a non-empty list of mappings with a role and a content."""
    wanted = "mappings with a role and a content, both strings"
    if not messages:
        raise UsageError(Code.USAGE, "there are no messages", expected=wanted)
    for index, message in enumerate(messages):
        fine = isinstance(message, Mapping) and all(
            isinstance(message.get(key), str) for key in ("role", "content")
        )
        if not fine:
            raise UsageError(
                Code.USAGE, f"message {index}", found=repr(message)[:80], expected=wanted
            )


def _environment() -> Any:
    """What templates of the hub rely on: block trimming, loop controls, and three helpers."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """Marks the assistant's text for training; its body is rendered as it is."""

        tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            body: list[nodes.Node] = parser.parse_statements(
                ("name:endgeneration",), drop_needle=True
            )
            return body

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    def tojson(value: Any, indent: int | None = None, **options: Any) -> str:
        # Not jinja2's own filter: that one escapes for HTML.
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", GenerationBlock],
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
