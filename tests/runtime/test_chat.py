"""Chat templates: what hub templates rely on, compared with transformers, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.toy_artifacts import TEMPLATE

from staticlm.errors import ArtifactError, Code, UsageError
from staticlm.runtime.chat import render_chat

TALK = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "<Hi> ü"}]
FANCY = """{%- set ns = namespace(n=0) -%}
{% for m in messages %}
    {% if m.role == 'skip' %}{% continue %}{% endif %}
    {% set ns.n = ns.n + 1 %}
    {% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}
{{ ns.n }}{{ m | tojson }}{{ m.content.strip() }}
{% endfor %}
{{- 'go' if add_generation_prompt else '' }}{{ tools is none }}{{ eos_token }}"""


def test_special_tokens_and_generation_prompt() -> None:
    special = {"bos_token": "<s>"}
    assert render_chat(TEMPLATE, TALK, special) == (
        "<s>[system]Be kind.</s>\n[user]<Hi> ü</s>\n[assistant]"
    )
    assert render_chat(TEMPLATE, TALK, special, generate=False).endswith("ü</s>\n")


@pytest.mark.parametrize("template", [TEMPLATE, FANCY])
def test_renders_as_transformers_does(template: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    talk = [*TALK, {"role": "skip", "content": "x"}, {"role": "assistant", "content": " yes "}]
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    expected, _ = render_jinja_template(
        conversations=[talk], chat_template=template, add_generation_prompt=True, **special
    )
    assert render_chat(template, talk, special) == expected[0]


def test_strftime_now() -> None:
    assert render_chat("{{ strftime_now('%Y') }}", TALK, {}).isdigit()


@pytest.mark.parametrize(
    ("template", "error", "part"),
    [
        (None, ArtifactError, "no chat template"),
        ("{% if %}", ArtifactError, "malformed"),
        ("{{ raise_exception('roles must alternate') }}", UsageError, "roles must alternate"),
        ("{{ messages[7].content }}", UsageError, "refuses"),
        ("{{ ''.__class__.__mro__ }}", ArtifactError, "unsafe"),
        ("{{ messages.append(1) }}", ArtifactError, "unsafe"),
    ],
)
def test_refused_templates(template: str | None, error: type[Exception], part: str) -> None:
    with pytest.raises(error, match=part):
        render_chat(template, TALK, {})


@pytest.mark.parametrize(
    "messages", [[], ["hi"], [{"role": "user"}], [{"role": "user", "content": 3}]]
)
def test_malformed_messages(messages: Any) -> None:
    with pytest.raises(UsageError) as caught:
        render_chat(TEMPLATE, messages, {})
    assert caught.value.code is Code.USAGE
