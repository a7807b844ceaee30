"""Every error that a user of minigen can cause, by name.

Each message is one sentence that says what was wrong, where, and what would be right.
The command line prints it and exits; it never shows a traceback for one of these.
"""


class MinigenError(Exception):
    """The base of every error that a user can cause."""


class ModelNotFoundError(MinigenError):
    """A model's name leads to nothing on this machine or on a hub."""


class DownloadError(MinigenError):
    """A pull did not finish: no connection, no space, or not the bytes that were promised."""


class FileFormatError(MinigenError):
    """A file is not what its format says that it should be."""


class ConfigError(MinigenError):
    """A model's configuration misses a field, contradicts itself, or makes no sense."""


class UnsupportedError(MinigenError):
    """A model asks for something that minigen does not honour."""


class WeightsError(MinigenError):
    """Tensors are missing, surplus or of the wrong shape for the model's configuration."""


class TokenizerError(MinigenError):
    """A tokenizer cannot be read, or does not belong to the model."""


class ChatTemplateError(MinigenError):
    """A model has no chat template, or its template refuses the messages."""


class PromptError(MinigenError, ValueError):
    """A prompt is empty, not text or token ids, or holds ids that the model does not know."""


class ContextLengthError(PromptError):
    """A prompt, with what it is to be continued by, does not fit into the model's context."""


class ParamsError(MinigenError, ValueError):
    """A sampling parameter is impossible."""


class OptionError(MinigenError, ValueError):
    """An option of `LLM.load` or of the command line is impossible."""


class OutOfBlocksError(MinigenError):
    """The pool of KV blocks has fewer free blocks than are wanted."""


class CapacityError(PromptError):
    """A request needs more KV blocks than the pool has in all."""


class RequestError(MinigenError):
    """A request's id is unknown, or in use already."""


class PartError(MinigenError):
    """A part that was put into the engine returned something that it must not."""


class EngineStoppedError(MinigenError):
    """The engine's thread has ended, so nobody will answer any more."""


class WorkerError(EngineStoppedError):
    """A process that holds a share of the model has ended, so none of them can go on."""


class LoadError(MinigenError):
    """A load cannot be put on a server: nobody answers, or its trace or prompts are broken."""
