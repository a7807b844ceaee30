"""Every error that a user of minigen can cause, by name.

Each message is one sentence that says what was wrong, where, and what would be right.
The command line prints it and exits; it never shows a traceback for one of these.
"""


class MinigenError(Exception):
    """The base of every error that a user can cause."""


class ModelNotFoundError(MinigenError):
    """No model of this name was found, on this machine or on a hub."""


class DownloadError(MinigenError):
    """A download failed: no connection, no disk space, or bytes that do not match the expected."""


class DiskError(DownloadError):
    """The disk is full or not writable, so a file cannot be stored."""


class FileFormatError(MinigenError):
    """A file does not follow its format."""


class ConfigError(MinigenError):
    """A model's configuration lacks a field, contradicts itself, or has an impossible value."""


class UnsupportedError(MinigenError):
    """A model needs a feature that minigen does not support."""


class WeightsError(MinigenError):
    """Tensors are missing, unexpected, or of the wrong shape for the model's configuration."""


class TokenizerError(MinigenError):
    """A tokenizer cannot be read, or does not belong to the model."""


class ChatTemplateError(MinigenError):
    """A model has no chat template, or its template refuses the messages."""


class PromptError(MinigenError, ValueError):
    """A prompt is empty, is neither text nor token ids, or has ids outside the vocabulary."""


class ContextLengthError(PromptError):
    """A prompt, with the answer it needs, does not fit into the model's context."""


class ParamsError(MinigenError, ValueError):
    """A sampling parameter has an invalid value."""


class OptionError(MinigenError, ValueError):
    """An option of `LLM.load` or of the command line has an invalid value."""


class OutOfBlocksError(MinigenError):
    """The pool of KV blocks has fewer free blocks than were requested."""


class CapacityError(PromptError):
    """A request needs more KV blocks than the whole pool has."""


class RequestError(MinigenError):
    """A request's id is unknown or already in use, or a call does not fit the request's state."""


class PartError(MinigenError):
    """A part that was passed in to the engine broke the contract of its socket."""


class GrammarError(MinigenError):
    """A grammar that an answer must follow allows no further token, or exceeds its limits."""


class StartError(MinigenError):
    """A process that a request needs could not be started, which is not the request's fault."""


class EngineStoppedError(MinigenError):
    """The engine's thread has ended, so no request can be answered."""


class WorkerError(EngineStoppedError):
    """A process that holds a shard of the model has ended or failed, so no step can run."""


class SlowPathWarning(UserWarning):
    """A model runs on a slower path than this processor has, for a reason that can be removed."""


class LoadError(MinigenError):
    """A load test cannot run: the server does not answer, or the trace or prompts are broken."""
