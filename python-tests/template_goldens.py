"""The output of `transformers` for the corpus of chat templates in frontend/tests/templates.

`python python-tests/template_goldens.py` records it, with `transformers` of requirements.txt installed, into
frontend/tests/templates/goldens. The frontend's own tests compare with that, and test_templates.py checks that it
is up to date.
"""

import datetime
import json
import os
from pathlib import Path
from unittest import mock

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # It needs no model framework, and would warn that there is none.

from jinja2.exceptions import TemplateError, TemplateRuntimeError, TemplateSyntaxError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

FOLDER = Path(__file__).parent.parent / "frontend" / "tests" / "templates"
CORPUS = json.loads((FOLDER / "cases.json").read_text())
TEMPLATES = CORPUS["templates"]
CASES = CORPUS["cases"]

# A template may ask for the date. The goldens are made with this date, and record the requested format.
DAY = datetime.datetime(2031, 3, 9, 17, 4, 5)
FORMATS = ["%d %b %Y", "%B %d, %Y"]


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return DAY


def source(template):
    return (FOLDER / f"{template}.jinja").read_text()


def apply(template, case):
    """The prompt of a case, or the exception, from the reference implementation."""
    model = WordLevel({"[UNK]": 0}, unk_token="[UNK]")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **TEMPLATES[template])
    return tokenizer.apply_chat_template(
        case["messages"],
        tools=case.get("tools"),
        chat_template=source(template),
        add_generation_prompt=case["add_generation_prompt"],
        tokenize=False,
        **case.get("extra", {}),
    )


def outcome(template, case):
    """One entry of a golden file: the prompt, the error that the template raised, or another failure."""
    try:
        with mock.patch.object(chat_template_utils, "datetime", Clock):
            prompt = apply(template, case)
    except TemplateSyntaxError:
        raise
    except TemplateRuntimeError as error:
        return {"failed": str(error)}
    except TemplateError as error:
        return {"raised": str(error)}
    except (TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        return {"failed": str(error)}
    for asked in FORMATS:
        prompt = prompt.replace(DAY.strftime(asked), f"«{asked}»")
    return {"prompt": prompt}


def golden(template):
    return {name: outcome(template, case) for name, case in CASES.items()}


def golden_path(template):
    return FOLDER / "goldens" / f"{template}.json"


if __name__ == "__main__":
    for template in TEMPLATES:
        golden_path(template).write_text(json.dumps(golden(template), ensure_ascii=False, indent=1) + "\n")
