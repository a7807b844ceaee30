"""A virtual environment per client, as its users install it, beside `.venv`.

One environment for all would hold each client back to what the others allow: instructor, for
example, takes only older versions of OpenAI's client. The versions are pinned, so that a result can
be repeated. A second run with the same pins does nothing.
"""

import hashlib
import json
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from tools.environment import ENVIRONMENT

FOLDER = ENVIRONMENT.with_name(f"{ENVIRONMENT.name}-clients")
RUNNER = "pytest==9.2.0"


@dataclass(frozen=True)
class Client:
    """A client: its name in the table, what pip installs, and its scenarios in tests/clients."""

    name: str
    packages: tuple[str, ...]
    scenarios: str


CLIENTS = (
    Client("OpenAI", ("openai==3.57.0",), "stock_openai.py"),
    Client("OpenAI Agents SDK", ("openai-agents==0.24.0", "openai==3.57.0"), "stock_agents.py"),
    Client(
        "Pydantic AI",
        ("pydantic-ai-slim[openai]==2.68.0", "openai==3.57.0"),
        "stock_pydantic_ai.py",
    ),
    Client("Instructor", ("instructor==1.17.0", "openai==3.3.0"), "stock_instructor.py"),
    Client(
        "LangChain",
        (
            *("langchain-openai==1.7.4", "langchain-core==1.8.3", "langchain==1.5.2"),
            *("langgraph==1.2.24", "openai==3.57.0"),
        ),
        "stock_langchain.py",
    ),
    Client("Anthropic", ("anthropic==2.14.0",), "stock_anthropic.py"),
    Client("Ollama", ("ollama==0.6.3",), "stock_ollama.py"),
)


class SetupError(Exception):
    """An environment could not be set up; the message is a sentence that says why."""


def folder_of(client: Client) -> Path:
    """Return the folder of a client's environment."""
    return FOLDER / Path(client.scenarios).stem.removeprefix("stock_")


def python_of(client: Client) -> Path:
    """Return the path of the Python in a client's environment."""
    return folder_of(client) / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def set_up(client: Client) -> None:
    """Create and fill a client's environment, unless it is complete already.

    Raises `SetupError` if pip fails; its output says why.
    """
    wanted = (*client.packages, RUNNER)
    state = hashlib.sha256("\n".join(wanted).encode()).hexdigest()
    stamp = folder_of(client) / "client-installed.txt"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == state:
        return
    if not python_of(client).exists():
        venv.create(folder_of(client), with_pip=True)
    print("installing:", *wanted, file=sys.stderr, flush=True)
    command = [str(python_of(client)), "-m", "pip", "install", "--quiet", *wanted]
    if subprocess.run(command, check=False).returncode:
        raise SetupError(f"{client.name} could not be installed; pip's output above says why.")
    stamp.write_text(state, encoding="utf-8")


def versions_of(client: Client) -> dict[str, str]:
    """Return the installed versions of the packages that a client names, its own first."""
    named = [name_of(each) for each in client.packages]
    script = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps({each: version(each) for each in sys.argv[1:]}))"
    )
    command = [str(python_of(client)), "-c", script, *named]
    found = subprocess.run(command, capture_output=True, check=True, encoding="utf-8").stdout
    versions: dict[str, str] = json.loads(found)
    return versions


def name_of(requirement: str) -> str:
    """Return the package that a requirement such as `name[extra]==1.0` names."""
    return requirement.partition("==")[0].partition("[")[0]
