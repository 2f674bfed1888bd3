"""Text to token ids and back; the chat template; stop strings. No torch.

User text never makes control tokens. ``encode_user_text`` encodes the text of a control token as the ordinary characters
that it is. A chat template is rendered with every control token's text in the messages broken by a guard character; what
is a control token in the rendered text then came from the template, and the guards are taken out again before the
pieces between control tokens are encoded. So the tokens of harmless messages are exactly those of encoding the whole
rendered text, and harmful ones cannot end their turn.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meta_executor.engine.errors import EngineError, ModelFormatError, ModelNotFoundError, reading
from meta_executor.engine.gguf_file import GgufFile
from meta_executor.engine.weights import ModelSource, resolve_model

if TYPE_CHECKING:
    from meta_executor.engine.templates import ChatTemplate

#: What of a template's error is repeated (characters): it may hold a client's text.
_ECHO_MAX = 300
#: Largest id of a token; the largest vocabularies have a few hundred thousand.
_ID_MAX = (1 << 22) - 1
#: Pieces in which a text is looked at (characters).
_PIECE_CHARACTERS = 32 * 1024
#: Tokens that wait to become a whole character (count), which has at most four; with each token all that wait are decoded
#: again, and an answer may be told to make half ones for ever.
_WAITING_MAX = 8
#: A text with every byte that UTF-8 has: what cannot be encoded shows with it, not with some client's text.
_EVERY_BYTE = "".join(
    map(chr, (*range(0x800), *range(0x800, 0xD800, 0x400), 0xE000, 0xF000, *range(0x10000, 0x110000, 0x8000)))
)
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
#: Characters of which one that no message and no control token holds becomes the guard (a private use area).
_GUARDS = range(0xE000, 0xF8FF)
#: GGUF pre-tokenizer names -> the splitting rule. Others are refused: a wrong rule gives wrong tokens silently.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


#: What a chat template finds under these names is not a client's to choose.
TEMPLATE_VARIABLES = frozenset(("messages", "add_generation_prompt", "bos_token", "eos_token"))


class TemplateError(EngineError, ValueError):
    """The messages do not fit the model's chat template, or it has none."""


class Tokenizer:
    """A model's tokenizer.

    Attributes:
        vocab_size: Token ids are below this (count).
        eos_token_ids: Tokens that end an answer.
        bos_token_id: Token that begins a text, if the model wants one.
    """

    def __init__(
        self,
        backend: Any,
        *,
        control_tokens: Mapping[str, int],
        chat_template: str | None,
        bos_token_id: int | None,
        eos_token_ids: Sequence[int],
        add_bos: bool,
    ) -> None:
        self._backend = backend
        self._backend.encode_special_tokens = True
        self._control = dict(control_tokens)
        self._control_ids = frozenset(self._control.values())
        self._template_text = chat_template
        self._template: ChatTemplate | None = None
        self._add_bos = add_bos and bos_token_id is not None
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        for text, control in self._control.items():
            if len(text) < 2:
                # Between two characters a guard has a place; one alone would be a control token wherever a text has it.
                what = f"is one character, {text!r}, which texts have too" if text else "has no text"
                raise ModelFormatError(f"control token {control} {what}")
        for name, ids in (("bos_token_id", (bos_token_id,)), ("eos_token_ids", self.eos_token_ids)):
            for token in ids:
                if token is not None and not (isinstance(token, int) and 0 <= token < self.vocab_size):
                    raise ModelFormatError(f"{name}: {token!r} is not the id of one of {self.vocab_size} tokens")
        ordered = sorted(self._control, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(re.escape(text) for text in ordered)) if ordered else None
        #: What control tokens begin and end with, and the lengths of that.
        self._begins = {text[:size] for text in ordered for size in range(1, len(text))}
        self._ends = {text[size:] for text in ordered for size in range(1, len(text))}
        self._part_sizes = range(1, len(ordered[0])) if ordered else range(0)
        document = json.loads(backend.to_str())
        model, decoder = document["model"], document.get("decoder") or {}
        unknown = model.get("unk_token")
        if model["type"] != "BPE" or (unknown is not None and unknown not in model["vocab"]):
            # Others encode every text; the library keeps what a tokenizer has encoded, also when the tokenizer is gone.
            try:
                self._encoding(_EVERY_BYTE)
            except Exception as error:  # the library raises bare Exception
                raise ModelFormatError(f"the tokenizer cannot encode every text: {str(error)[:_ECHO_MAX]}") from error
        self._byte_level = decoder.get("type") == "ByteLevel"
        self._bytes_of: list[bytes] | None = self._token_bytes() if self._byte_level else None
        #: No token stands for more bytes than this; 0: not known.
        self._token_bytes_max = max(map(len, self._bytes_of)) if self._bytes_of else 0

    # -- where it comes from ------------------------------------------------------------------------------------------

    @staticmethod
    def for_model(model: str) -> Tokenizer:
        """The tokenizer of a configured model.

        Raises:
            ModelNotFoundError: No such model.
            ModelFormatError: It has no tokenizer that is supported.
        """
        return Tokenizer.from_source(resolve_model(model))

    @staticmethod
    def from_source(source: ModelSource) -> Tokenizer:
        """The tokenizer of a found model."""
        return Tokenizer.from_gguf(source.path) if source.kind == "gguf" else Tokenizer.from_folder(source.path)

    @staticmethod
    def synthetic(vocab_size: int) -> Tokenizer:
        """A byte-level tokenizer without a model: bytes are the ids 3..258, words the ids after them.

        Args:
            vocab_size: Ids (count), > 300.
        """
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers

        if vocab_size < 300:
            raise ValueError(f"vocab_size must be at least 300, got {vocab_size}")
        vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
        for character in sorted(_byte_alphabet()):
            vocabulary[character] = len(vocabulary)
        for index in range(len(vocabulary), vocab_size):
            vocabulary[f"Ġw{index}"] = index
        backend = Backend(models.BPE(vocab=vocabulary, merges=[], unk_token=None))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        control = {"<s>": 1, "</s>": 2}
        backend.add_special_tokens(list(control))
        template = (
            "{% for message in messages %}{{ '<s>' + message['role'] + '\n' + message['content'] + '</s>' }}"
            "{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
        )
        return Tokenizer(
            backend, control_tokens=control, chat_template=template, bos_token_id=1, eos_token_ids=(2,), add_bos=False
        )

    @staticmethod
    def from_gguf(path: str | os.PathLike[str]) -> Tokenizer:
        """Build the tokenizer that a GGUF file's metadata describes.

        Raises:
            ModelFormatError: Its kind or its splitting rule is not supported; names the field.
        """
        with reading(path):
            return Tokenizer._of_gguf(path)

    @staticmethod
    def _of_gguf(path: str | os.PathLike[str]) -> Tokenizer:
        metadata = GgufFile(path).metadata
        kind = metadata.get("tokenizer.ggml.model")
        for key in ("tokens", "merges" if kind == "gpt2" else "scores"):
            if f"tokenizer.ggml.{key}" not in metadata:
                raise ModelFormatError(f"{path}: tokenizer.ggml.{key} is missing")
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        kinds = np.asarray(metadata.get("tokenizer.ggml.token_type", np.full(len(tokens), _NORMAL)))
        if len(kinds) != len(tokens):
            raise ModelFormatError(f"{path}: tokenizer.ggml.token_type has {len(kinds)} entries, not {len(tokens)}")
        if kind == "gpt2":
            backend, wants_bos = _byte_level_backend(metadata, tokens, str(path))
        elif kind == "llama":
            backend, wants_bos = _sentence_piece_backend(metadata, tokens, kinds), True
        else:
            raise ModelFormatError(f"{path}: tokenizer.ggml.model is {kind!r}; 'gpt2' and 'llama' are supported")
        control = {tokens[index]: int(index) for index in np.flatnonzero(kinds == _CONTROL)}
        backend.add_special_tokens(list(control))
        eos = [metadata.get("tokenizer.ggml.eos_token_id"), metadata.get("tokenizer.ggml.eot_token_id")]
        bos = metadata.get("tokenizer.ggml.bos_token_id")
        return Tokenizer(
            backend,
            control_tokens=control,
            chat_template=metadata.get("tokenizer.chat_template"),
            bos_token_id=None if bos is None else int(bos),
            eos_token_ids=tuple(dict.fromkeys(int(token) for token in eos if token is not None)),
            add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", wants_bos)),
        )

    @staticmethod
    def from_folder(folder: str | os.PathLike[str]) -> Tokenizer:
        """Read ``tokenizer.json`` and ``tokenizer_config.json`` of a Hugging Face folder.

        Raises:
            ModelNotFoundError: There is no ``tokenizer.json``.
            ModelFormatError: A file is damaged.
        """
        with reading(folder):
            return Tokenizer._of_folder(Path(folder))

    @staticmethod
    def _of_folder(root: Path) -> Tokenizer:
        from tokenizers import Tokenizer as Backend

        if not (root / "tokenizer.json").is_file():
            raise ModelNotFoundError(f"model folder {root} has no tokenizer.json")
        text = (root / "tokenizer.json").read_text("utf-8")
        try:
            added = _with_small_ids(json.loads(text)).get("added_tokens", [])
            backend = Backend.from_str(text)
            config = _json_of(root / "tokenizer_config.json")
            model = _json_of(root / "config.json") | _json_of(root / "generation_config.json")
        except Exception as error:  # the library raises bare Exception
            raise ModelFormatError(f"{root}: {error}") from error
        control = {str(entry["content"]): int(entry["id"]) for entry in added if entry.get("special")}
        template = config.get("chat_template")
        if isinstance(template, list):
            template = next((item["template"] for item in template if item.get("name") == "default"), None)
        if template is None and (root / "chat_template.jinja").is_file():
            template = (root / "chat_template.jinja").read_text("utf-8")
        eos = model.get("eos_token_id")
        bos = model.get("bos_token_id")
        add_bos = bool(config.get("add_bos_token", False)) or _template_processor_adds_bos(text, bos)
        return Tokenizer(
            backend,
            control_tokens=control,
            chat_template=template,
            bos_token_id=bos if isinstance(bos, int) else None,
            eos_token_ids=(eos,) if isinstance(eos, int) else tuple(eos or ()),
            add_bos=add_bos,
        )

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write it as a Hugging Face folder, for programs that count tokens themselves."""
        names = {index: text for text, index in self._control.items()}
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": self._template_text,
            "add_bos_token": self._add_bos,
            "bos_token": None if self.bos_token_id is None else names.get(self.bos_token_id),
            "eos_token": names.get(self.eos_token_ids[0]) if self.eos_token_ids else None,
        }
        Path(folder, "tokenizer.json").write_text(self._backend.to_str(), "utf-8")
        Path(folder, "tokenizer_config.json").write_text(json.dumps(config), "utf-8")

    # -- encoding -----------------------------------------------------------------------------------------------------

    @property
    def control_token_ids(self) -> frozenset[int]:
        """Tokens that text cannot make."""
        return self._control_ids

    def encode_user_text(self, text: str) -> list[int]:
        """Encode plain text; never a control token, except the begin token of a model that wants one.

        Returns:
            Token ids. An empty text gives an empty list or the begin token.
        """
        return self._begin() + self._plain(text)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, str | int | float | bool | None] | None = None,
    ) -> list[int]:
        """Encode a conversation by the model's template.

        Args:
            messages: Mappings with ``role`` and ``content``, both text.
            add_generation_prompt: Begin the assistant's turn.
            variables: What else the template may look at, by name; none of :data:`TEMPLATE_VARIABLES`.

        Raises:
            TemplateError: The model has no template, or it refuses these messages.
        """
        variables = variables or {}
        taken = TEMPLATE_VARIABLES.intersection(variables)
        if taken:
            raise TemplateError(f"{min(taken)} is the template's own variable")
        guard = self._guard([*messages, variables])
        guarded = [
            {key: self._guarded(value, guard) if isinstance(value, str) else value for key, value in message.items()}
            for message in messages
        ]
        # Text of the client's, whatever it is called, makes no control token.
        told = {
            name: self._guarded(value, guard) if isinstance(value, str) else value for name, value in variables.items()
        }
        rendered = self._render(guarded, add_generation_prompt, told)
        ids: list[int] = []
        at = 0
        for match in self._control_pattern.finditer(rendered) if self._control_pattern else ():
            ids += self._plain(rendered[at : match.start()].replace(guard, ""))
            ids.append(self._control[match.group()])
            at = match.end()
        ids += self._plain(rendered[at:].replace(guard, ""))
        if self._add_bos and ids[:1] != [self.bos_token_id]:
            ids = self._begin() + ids
        return ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of tokens; control tokens have none."""
        ids = [token for token in token_ids if token not in self._control_ids]
        if self._bytes_of is not None:
            return b"".join(self._bytes_of[token] if 0 <= token < len(self._bytes_of) else b"" for token in ids).decode(
                "utf-8", errors="replace"
            )
        return str(self._backend.decode(ids, skip_special_tokens=True))

    def detokenizer(self) -> IncrementalDetokenizer:
        """A new answer's detokenizer."""
        return IncrementalDetokenizer(self)

    def token_bytes(self, token_id: int) -> bytes | None:
        """A token's bytes: none for a control token or an unknown id. None if the tokenizer is not byte-level."""
        if self._bytes_of is None:
            return None
        if token_id in self._control_ids or not 0 <= token_id < len(self._bytes_of):
            return b""
        return self._bytes_of[token_id]

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """One token by itself, for people: its text and its bytes. A control token has its name; bytes that are no whole
        character are shown as ``bytes:`` and their hexadecimal values; an unknown id has neither."""
        if token_id in self._control_ids:
            name = str(self._backend.id_to_token(token_id) or "")
            return name, name.encode()
        data = self.token_bytes(token_id)
        if data is None:
            text = self.decode([token_id]) if 0 <= token_id < self.vocab_size else ""
            return text, text.encode()
        try:
            return data.decode(), data
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data

    def tokens_at_least(self, text: str) -> int:
        """Tokens that a text has at least (count), from its length alone: what can be refused before it is encoded."""
        if not self._token_bytes_max:
            return 0
        size = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
        return size // self._token_bytes_max

    def surely_more(self, texts: Iterable[str], tokens: int) -> bool:
        """Whether texts have more than so many tokens (count) together, found out without encoding all of them.

        They are encoded piece by piece until there are twice as many, which a token that was cut at the end of a piece does not
        make up for. So a text of megabytes costs no more than what may be encoded, in time and in memory. False: perhaps not.
        """
        found = 0
        for text in texts:
            for begin in range(0, len(text), _PIECE_CHARACTERS):
                found += len(self._encoding(text[begin : begin + _PIECE_CHARACTERS]))
                if found > 2 * tokens:
                    return True
        return False

    # -- within -------------------------------------------------------------------------------------------------------

    def _begin(self) -> list[int]:
        return [self.bos_token_id] if self._add_bos and self.bos_token_id is not None else []

    def _plain(self, text: str) -> list[int]:
        return list(self._encoding(text).ids) if text else []

    def _encoding(self, text: str) -> Any:
        # A lone surrogate (JSON can carry one) has no UTF-8 form; it reads as the replacement character.
        clean = text.encode("utf-8", errors="replace").decode("utf-8") if _has_surrogate(text) else text
        # Unlike ``encode`` this lets go of the interpreter's lock: a thread that encodes a long text holds up nobody.
        return self._backend.encode_batch([clean], add_special_tokens=False)[0]

    def _guard(self, messages: Sequence[Mapping[str, Any]]) -> str:
        # In a control token's own text a guard would make tokens where it is to break them.
        used = set().union(
            *self._control,
            *(set(value) for message in messages for value in message.values() if isinstance(value, str)),
        )
        for code in _GUARDS:
            if chr(code) not in used:
                return chr(code)
        raise TemplateError("the messages and the control tokens use every private-use character")

    def _guarded(self, text: str, guard: str) -> str:
        """Break every control token's text, and what could become one beside the template's own text."""
        if self._control_pattern is None:
            return text
        broken = 1
        while broken:
            # More than one pass only for control tokens that overlap; never one pass per token, which is quadratic.
            text, broken = self._control_pattern.subn(lambda match: match[0][0] + guard + match[0][1:], text)
        before = guard if any(text[:size] in self._ends for size in self._part_sizes) else ""
        after = guard if any(text[-size:] in self._begins for size in self._part_sizes) else ""
        return before + text + after

    def _render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        import jinja2

        from meta_executor.engine.templates import ChatTemplate

        if self._template_text is None:
            raise TemplateError("this model has no chat template; use /v1/completions")
        try:
            if self._template is None:
                self._template = ChatTemplate(self._template_text)
            names = {index: text for text, index in self._control.items()}
            return self._template.render(
                {
                    **variables,
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                    "bos_token": names.get(-1 if self.bos_token_id is None else self.bos_token_id, ""),
                    "eos_token": names.get(self.eos_token_ids[0] if self.eos_token_ids else -1, ""),
                }
            )
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AssertionError,  # a filter's, about its arguments
            AttributeError,
            LookupError,
            MemoryError,
            NameError,  # a number beyond every float becomes the name inf
            RecursionError,
            SyntaxError,  # a digit of another script, or blocks nested deeper than the interpreter allows
            TypeError,
            ValueError,
        ) as error:
            raise TemplateError(f"chat template: {str(error)[:_ECHO_MAX] or type(error).__name__}") from error

    def _token_bytes(self) -> list[bytes]:
        byte_of = {character: byte for byte, character in _byte_characters().items()}
        table = []
        for index in range(self.vocab_size):
            token = self._backend.id_to_token(index)
            if token is None:
                table.append(b"")
            elif all(character in byte_of for character in token):
                table.append(bytes(byte_of[character] for character in token))
            else:
                table.append(token.encode("utf-8"))
        return table


class IncrementalDetokenizer:
    """Turns an answer's tokens into text as they come; never hands out half a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        #: Only for tokenizers that are not byte-level: tokens whose text is not wholly told yet, after some context.
        self._window: list[int] = []
        self._told_tokens = 0

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that these tokens complete."""
        parts = []
        for token in token_ids:
            data = self._tokenizer.token_bytes(token)
            parts.append(self._utf8.decode(data) if data is not None else self._windowed(token))
        return "".join(parts)

    def finish(self) -> str:
        """What is left: the replacement character for a character that was never completed."""
        if self._window:
            return self._news()
        return self._utf8.decode(b"", final=True)

    def _windowed(self, token: int) -> str:
        if token in self._tokenizer.control_token_ids:
            return ""
        self._window.append(token)
        text = self._news()
        waiting = len(self._window) - self._told_tokens
        if waiting < _WAITING_MAX and (not text or text.endswith("\ufffd")):
            return ""
        # Keep the newest told tokens as context: the text of a token can depend on those before it.
        self._window = self._window[self._told_tokens :]
        self._told_tokens = len(self._window)
        return text

    def _news(self) -> str:
        told = self._tokenizer.decode(self._window[: self._told_tokens])
        return self._tokenizer.decode(self._window)[len(told) :]


class StopStrings:
    """Watches an answer for strings that end it.

    Args:
        stops: Non-empty strings. What is found, and everything after it, is not part of the answer.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("an empty stop string")
        self._stops = tuple(stops)
        self._held = ""
        #: Characters at the beginning of what is held in which no stop string ends.
        self._early = 0
        self.hit: str | None = None

    def push(self, text: str, *, early: bool = False) -> str:
        """Text that can be shown now; what might be the beginning of a stop string is held back.

        After a hit (:attr:`hit` is set) everything is swallowed.

        Args:
            text: More of the answer.
            early: No stop string ends in it, but one that begins in it may end later.
        """
        if not self._stops:
            return text
        if self.hit is not None:
            return ""
        self._held += text
        if early:
            self._early = len(self._held)
        begins = [(self._held.find(stop, max(self._early - len(stop) + 1, 0)), stop) for stop in self._stops]
        found = [(at, stop) for at, stop in begins if at >= 0]
        if found:
            at, self.hit = min(found)
            shown, self._held = self._held[:at], ""
            return shown
        keep = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._held)), keep, -1):
                if self._held.endswith(stop[:size]):
                    keep = size
                    break
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        self._early = max(self._early - len(shown), 0)
        return shown

    def finish(self) -> str:
        """What was held back, once no more text comes."""
        shown, self._held = self._held, ""
        return shown


def _byte_level_backend(metadata: Mapping[str, Any], tokens: list[str], where: str) -> tuple[Any, bool]:
    """BPE over bytes, and whether its models want a begin token."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    splitter: Any
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rule = metadata.get("tokenizer.ggml.pre", "default")
    is_llama3 = rule in ("llama-bpe", "llama3", "llama-v3")
    if rule in ("smollm", "starcoder", "refact", "command-r"):
        splitter = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif rule in ("gpt-2", "default"):
        splitter = byte_level
    elif is_llama3:
        split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated")
        splitter = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    else:
        raise ModelFormatError(f"{where}: tokenizer.ggml.pre {rule!r} is not supported")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        backend = Backend(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=is_llama3))
    except Exception as error:  # the library has no narrower one for merges of tokens that are not there
        raise ModelFormatError(f"{where}: tokenizer.ggml.merges: {error}") from error
    backend.pre_tokenizer = splitter
    backend.decoder = decoders.ByteLevel()
    return backend, is_llama3


def _sentence_piece_backend(metadata: Mapping[str, Any], tokens: list[str], kinds: Any) -> Any:
    """SentencePiece's BPE: of all neighbours whose union is a piece, the best scored union is made first.

    That is a merge list: every split of every piece into two pieces, in the order of the scores. Control tokens are in no
    merge, so text cannot become one.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    scores = np.asarray(metadata["tokenizer.ggml.scores"])
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pieces = {tokens[index] for index in np.flatnonzero(np.isin(kinds, (_NORMAL, _USER_DEFINED)))}
    merges = []
    for index in np.lexsort((np.arange(len(scores)), -scores)):
        piece = tokens[index]
        if piece in pieces:
            splits = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
            merges += [(left, right) for left, right in splits if left in pieces and right in pieces]
    unknown = next((tokens[index] for index in np.flatnonzero(kinds == _UNKNOWN)), None)
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁")] * prefix + [normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()] + [decoders.Strip(" ", 1, 0)] * prefix
    )
    return backend


def _byte_characters() -> dict[int, str]:
    """The printable stand-ins of bytes in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + len(table) - len(printable))
    return table


def _byte_alphabet() -> list[str]:
    return list(_byte_characters().values())


def _has_surrogate(text: str) -> bool:
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _json_of(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text("utf-8"))) if path.is_file() else {}


def _with_small_ids(document: dict[str, Any]) -> dict[str, Any]:
    """A ``tokenizer.json`` whose token ids may be places in a table: a single large one makes its reader fill gigabytes.

    Raises:
        ModelFormatError: One is not in 0..:data:`_ID_MAX`.
    """
    vocabulary = (document.get("model") or {}).get("vocab")
    named = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    for name, token in (*named.items(), *((one["content"], one["id"]) for one in document.get("added_tokens") or ())):
        if not isinstance(token, int) or not 0 <= token <= _ID_MAX:
            raise ModelFormatError(f"token {str(name)[:40]!r} has the id {str(token)[:40]}, want 0..{_ID_MAX}")
    return document


def _template_processor_adds_bos(text: str, bos: object) -> bool:
    processor = json.loads(text).get("post_processor") or {}
    parts = processor.get("processors", [processor])
    for part in parts:
        if part.get("type") == "TemplateProcessing":
            single = part.get("single") or [{}]
            name = single[0].get("SpecialToken", {}).get("id")
            ids = part.get("special_tokens", {}).get(name, {}).get("ids", [])
            return bos in ids
    return False
