"""Drafting by flags of either mode: V1's lists, V2's algorithms, or a profile. All become one `Speculation`."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from commands.options.drafter_flags import DrafterFlags, algorithm_flag, example_of, users_of
from commands.options.expand import given_flags
from commands.output.help import SPECULATION, as_flag, config_flag, option
from commands.output.output import note, warn
from runtime.drafters.lists import Devices, Parsed
from runtime.drafters.spec import DrafterSpec, DraftLenMode, Setting
from runtime.drafters.specs import DRAFT_LEN, DRAFTERS, MtpDrafter, SuffixDrafter, lookups
from runtime.drafters.speculation import Speculation
from runtime.util.errors import SpecDecError, UsageError
from runtime.util.words import nearest, word_among

_NO_PROFILE = "off"
_NONE = "none"
"""No drafter: a command line puts off with it what a file of settings or a variable has chosen."""
_AUTO = "AUTO"
"""The drafters of AUTO: suffix matching; old answers, if many requests are answered; n-gram lookup, if one of its flags
is given; the models that are given; the engine's self-draft copy; and the model's own head.
"""


def algorithms() -> dict[str, str]:
    """Names of drafters by the algorithms' names in leader mode."""
    return {spec.description.algorithm: name for name, spec in DRAFTERS.items() if spec.description.algorithm}


def parse_algorithm(text: str) -> str:
    """The algorithm of leader mode that `--spec-decode-algo` names, AUTO or none. UsageError for another name."""
    words = (*algorithms(), _AUTO)
    algorithm = word_among(text, (*words, _NONE))
    if algorithm is None:
        raise UsageError(
            f"unknown `--spec-decode-algo`: {text}",
            hint=f"{_perhaps(text, words)}there are {', '.join(words)}, and `{_NONE}` for no drafter",
        )
    return algorithm


def _perhaps(text: str, words: Iterable[str]) -> str:
    """The beginning of a hint, with the word that a misspelt word is most like: "perhaps `NGRAM`; " for NGRM."""
    by_plain = {word.casefold(): word for word in words}
    near = nearest(text.strip().casefold().replace("_", "-"), by_plain)
    return "" if near is None else f"perhaps `{by_plain[near]}`; "


def _is_auto(drafters: str) -> bool:
    return word_among(drafters.strip(), ("auto",)) is not None


def parse_drafter_names(text: str) -> list[str]:
    """Parse `--drafters ngram,draft-target`, or `none`; UsageError for a name that is unknown or comes twice."""
    names: list[str] = []
    if word_among(text.strip(), (_NONE,)):
        return names
    for word in text.split(","):
        name = word_among(word.strip(), DRAFTERS)
        if name is None:
            raise UsageError(
                f"`--drafters` names no drafter of specdec's: {word.strip() or repr(text)}",
                hint=f"{_perhaps(word, (*DRAFTERS, 'auto'))}there are {', '.join(DRAFTERS)}, with commas between them, "
                f"auto, and none",
            )
        if name in names:
            raise UsageError(f"`--drafters` names {name} twice: {text}", hint="name each once")
        names.append(name)
    return names


def _check_drafters(text: str) -> None:
    """UsageError for what is neither `auto` nor names of drafters."""
    if not _is_auto(text):
        parse_drafter_names(text)


Drafters = Annotated[
    str | None,
    option(
        SPECULATION,
        f"Use several drafters; each sequence gets the most profitable draft. Names: {', '.join(DRAFTERS)}, "
        "each with its own flag. `auto` uses every drafter whose flag you give, `none` no drafter.",
        check=_check_drafters,
        metavar="NAME,NAME",
    ),
]


_SPOKEN_AS_VOWELS = "AEFHILMNORSX"
"""Letters whose spoken names begin with a vowel, as M does: `an MTP head`."""


@dataclass(frozen=True)
class LeaderFlags:
    """Drafting settings among leader mode's flags, by their Python names; flags that are not given are left out."""

    values: Mapping[str, Any]
    algorithm: str | None = None
    drafts_by_copy: bool = False
    """True if the engine is built with a self-draft copy."""
    sends_what_pays: bool = True
    """True if drafts are cut to the length that pays, so that the drafter may offer long drafts."""
    model_dir: str | None = None
    answers_many: bool = False
    """True for commands that answer many requests, some of which may come again."""
    has_algorithms: bool = True
    """False for a command that has no `--spec-decode-algo`."""


@dataclass(frozen=True)
class SpeculationOptions:
    """Drafting flags; None where nothing was given."""

    flags: DrafterFlags = field(default_factory=DrafterFlags)
    draft_len_mode: Annotated[
        DraftLenMode | None,
        option(
            SPECULATION,
            "`auto` shortens each draft to the length that should save most time, judged by measured step times "
            "and by acceptance so far; the length may be 0. `fixed` sends drafts whole.",
            shown="auto in leader mode, fixed in orchestrator mode",
            metavar="[fixed|auto]",
        ),
    ] = None
    profile: Annotated[
        Path | None,
        option(
            SPECULATION,
            "Draft as `specdec tune` recommends for this model or engine, instead of by flags; `off` leaves out what "
            "`tune --save` has made the model's default.",
            metavar="FILE",
        ),
    ] = None
    drafters: Drafters = None

    @property
    def paths(self) -> list[Path]:
        """Paths to read."""
        given = [*given_flags(self.flags).values(), self.profile]
        return [path for path in given if isinstance(path, Path)]

    def find_profile(self, leader_flags: Iterable[str], model_dir: str | None) -> Path | None:
        """The profile that says how to draft: the profile that is given, or the model's default profile if no drafting
        flag is given. UsageError for `--profile` beside a flag that chooses a drafter; `leader_flags` are the flags of
        leader mode.
        """
        given = [*given_flags(replace(self, profile=None)), *leader_flags]
        if self.profile is not None and word_among(str(self.profile), (_NO_PROFILE,)) is None:
            if given:
                raise UsageError(
                    f"`{given[0]}` and `--profile` both say how to draft: {self.profile}",
                    hint="leave one of the two out",
                )
            return self.profile
        if self.profile is not None or given or model_dir is None:
            return None
        return _saved_profile(model_dir)

    def resolve(self, leader: LeaderFlags | None = None) -> tuple[Speculation, Devices]:
        """The `Speculation` that these flags describe, together with leader mode's flags if `leader` is given; a
        profile is not read.
        """
        return speculation_from_flags(given_flags(self.flags), self.drafters, self.draft_len_mode, leader)

    def check_has_drafter(self, leader: LeaderFlags) -> None:
        """UsageError for a drafter's flag, such as a draft length, if no drafter is chosen. Reads no model."""
        flags = _read_flags(given_flags(self.flags), self.drafters, leader)
        if flags.drafter_names():
            return
        flags.check_used(())
        if self.draft_len_mode == "auto":
            raise needs_drafter()


def needs_drafter() -> UsageError:
    """The error for automatic draft lengths without a drafter."""
    return UsageError(
        "`--draft-len-mode auto` needs a drafter: there is none", hint=f"`{example_of(SuffixDrafter)}` is one"
    )


def _saved_profile(model_dir: str) -> Path | None:
    """The model's default profile, and a note that it is used; None if there is none, or it cannot be used."""
    from runtime.builder.profile import find_saved_profile, profile_for_model

    path = find_saved_profile(model_dir)
    if path is None:
        return None
    try:
        speculation = profile_for_model(path, model_dir).speculation
    except SpecDecError as error:
        warn(f"the model's default of `tune --save` is not used: {error.message}")
        return None
    drafter = " and ".join(one.label for one in speculation) or "no drafter"
    note(f"as `tune --save` found best for this model: {drafter}; `--profile off` leaves it out")
    return path


def speculation_from_flags(
    given: Mapping[str, Any], drafters: str | None, draft_len_mode: DraftLenMode | None, leader: LeaderFlags | None
) -> tuple[Speculation, Devices]:
    """The drafters that flags ask for, and the target's devices. `given` is such as `{"--ngram-config": "[10,2,[0]]"}`.
    With `leader` None the flags are read as in TensorRT-LLM's orchestrator mode (V1), where each drafter needs its own
    flag. UsageError for several drafters without an order, for a drafter in two spellings, or if half of a drafter's
    flags are missing.
    """
    flags = _read_flags(given, drafters, leader)
    names = flags.drafter_names()
    chosen = tuple(flags.spec_of(DRAFTERS[name], names) for name in names)
    flags.check_used(names)
    devices = list(dict.fromkeys(one.devices for one in flags.lists.values() if one.devices is not None))
    if len(devices) > 1:
        raise UsageError(
            f"the drafters name different devices for the target: {', '.join(str(list(one)) for one in devices)}",
            hint="name the same devices in each",
        )
    return Speculation(chosen, draft_len_mode), devices[0] if devices else None


def _read_flags(given: Mapping[str, Any], drafters: str | None, leader: LeaderFlags | None) -> "_Flags":
    lists = {
        name: spec.description.form.parse(given[flag], flag)
        for name, spec in DRAFTERS.items()
        if (flag := config_flag(spec)) in given
    }
    return _Flags({flag[2:].replace("-", "_"): value for flag, value in given.items()}, lists, leader, drafters)


@dataclass(frozen=True)
class _Flags:
    """The flags of a command line, by their Python names. `lists` has the settings from V1's lists, by drafters'
    names.
    """

    given: Mapping[str, Any]
    lists: Mapping[str, Parsed]
    leader: LeaderFlags | None
    drafters: str | None
    """Value of `--drafters`."""

    def _chosen_by(self, spec: type[DrafterSpec]) -> str:
        """The flag to choose the drafter with: `--drafters` if it is given, or if the command has no
        `--spec-decode-algo`; else `--spec-decode-algo`.
        """
        named = self.drafters is not None or (self.leader is not None and not self.leader.has_algorithms)
        return f"--drafters {spec.description.name}" if named else algorithm_flag(spec)

    def drafter_names(self) -> list[str]:
        """Names of the drafters to use: the drafter that a flag chooses, or all that `--drafters` names."""
        named, drafters = None if self.leader is None else self.leader.algorithm, self.drafters
        algorithm = None if named is None else parse_algorithm(named)
        if algorithm is not None and drafters is not None:
            raise UsageError(
                f"`--spec-decode-algo` and `--drafters` cannot be given together: {algorithm}",
                hint="`--drafters` names the algorithms",
            )
        if algorithm is not None and self.lists:
            flag = config_flag(DRAFTERS[next(iter(self.lists))])
            raise UsageError(f"`--spec-decode-algo` and `{flag}` cannot be given together", hint="choose one drafter")
        if algorithm == _NONE:
            return []
        if algorithm is not None:
            return self._all() if algorithm == _AUTO else [algorithms()[algorithm]]
        if drafters is not None and _is_auto(drafters):
            return self._all()
        models = self._with_model()
        if self.leader and drafters is None and not self.lists and models:
            return models  # a draft model alone says what drafts
        return _chosen_names(list(self.lists), drafters)

    def _all(self) -> list[str]:
        """The names of all drafters that are given. In leader mode AUTO's lookups are used if no lookup is given."""
        if self.leader is None:
            names = {*self.lists}
        else:
            many = self.leader.answers_many
            asked = (
                name
                for name, spec in DRAFTERS.items()
                if spec.is_in_auto or (spec.is_in_auto_of_many and many) or self._has_own_flag(spec)
            )
            names = {*(self.lists or asked)}
            names |= {*self._with_model()}
            names |= {name for name, spec in DRAFTERS.items() if spec.needs_copy and self.leader.drafts_by_copy}
            names |= {name for name, spec in DRAFTERS.items() if spec.is_in_model(self.leader.model_dir)}
        if not names:
            raise UsageError(
                "`--drafters auto` chooses among the drafters that are given, and there is none",
                hint=f"`{' '.join(example_of(spec) for spec in lookups()[:2])}` are two",
            )
        return [name for name in DRAFTERS if name in names]

    def _has_own_flag(self, spec: type[DrafterSpec]) -> bool:
        """True if a flag is given that only this lookup takes."""
        values = {**(self.leader.values if self.leader else {}), **self.given}
        return spec.is_lookup and any([spec] == users_of(flag) for flag in values)

    def _with_model(self) -> list[str]:
        """The drafters whose models are named by a flag."""
        return [
            name
            for name, spec in DRAFTERS.items()
            if any((value := self._own_value(one)) is not None and spec.reads(value) for one in spec.models().values())
        ]

    def _own_value(self, setting: Setting) -> Any:
        """Value from the setting's own flags, of this mode or the other; None if they are not given."""
        value = self.given.get(setting.flag or "")
        return value if value is not None or not self.leader else self.leader.values.get(setting.leader_flag or "")

    def _model_of(self, spec: type[DrafterSpec], setting: Setting, names: Collection[str]) -> Any:
        """Value of a setting that names a model. For a drafter inside a model it is the target, unless a flag names a
        model that no other chosen drafter reads.
        """
        value = self._own_value(setting)
        own = None if self.leader is None else self.leader.model_dir
        others = (DRAFTERS[name] for name in names if name != spec.description.name)
        is_others = any(other.models() and other.reads(value) for other in others) if value is not None else True
        return own if spec.is_in_model(own) and is_others and not spec.is_in_model(value) else value

    def spec_of(self, spec: type[DrafterSpec], names: Collection[str]) -> DrafterSpec:
        """A drafter of `names`, with the settings from its list, and the settings that other flags give."""
        described, own = spec.description, self.lists.get(spec.description.name)
        if own is None and (self.leader is None or described.algorithm is None):
            raise UsageError(
                f"`--drafters` names {described.name}, which needs `{config_flag(spec)}`: {self.drafters}",
                hint=f"the form of `{config_flag(spec)}` is {described.form}",
            )
        values = {} if own is None else dict(own.values)
        for name, setting in spec.settings().items():
            if name in values:
                continue
            value = self._model_of(spec, setting, names) if name in spec.models() else self._own_value(setting)
            if value is None and own is None:
                value = self._leader_default(setting)
            if value is not None:
                values[name] = value
            elif name in spec.models():
                raise self._missing(spec, setting, own)
        return spec(**values)

    def _leader_default(self, setting: Setting) -> int | None:
        """Default of a setting in leader mode. Drafts that are cut to the length that pays may be long; other drafts
        are as long as TensorRT-LLM's.
        """
        assert self.leader is not None
        longest = setting.leader_default
        if longest is None or self.leader.sends_what_pays:
            return longest
        return setting.leader_fixed or min(longest, DRAFT_LEN)

    def _missing(self, spec: type[DrafterSpec], setting: Setting, own: Parsed | None) -> UsageError:
        described = spec.description
        named, engine = as_flag(setting.leader_flag or ""), as_flag(setting.flag or "")
        if spec is MtpDrafter and self.leader is not None and self.leader.model_dir is not None:
            flag = self._chosen_by(spec) if own is None else config_flag(spec)
            lookups_by = f"--spec-decode-algo {_AUTO}" if self.leader.has_algorithms else "--drafters auto"
            return UsageError(
                f"`{flag}` needs a model with an MTP head in its files: {self.leader.model_dir}",
                hint=f"take a model with an MTP head, or draft by lookup: `{lookups_by}`",
            )
        if own is not None and self.leader is not None:
            return UsageError(
                f"`{config_flag(spec)}` needs {_with_article(described.title)}: {own.text}",
                hint=f"`{named}` names the directory or hub id, or `{engine}` its engine",
            )
        if own is not None:
            return UsageError(
                f"`{config_flag(spec)}` needs the {described.title}'s engine: {own.text}",
                hint=f"`{engine}` names it; `specdec build` makes it from the {described.title}'s checkpoint",
            )
        return UsageError(
            f"`{self._chosen_by(spec)}` needs {_with_article(described.title)}",
            hint=f"`{named}` names the directory or hub id, or `{engine}` its engine",
        )

    def check_used(self, names: Collection[str]) -> None:
        """UsageError for a flag that none of the chosen drafters takes, or that gives a number which a drafter's list
        gives too.
        """
        for flag, value in self.given.items():
            self._check_is_taken(flag, value, names)
        for flag, value in {} if self.leader is None else self.leader.values.items():
            self._check_is_taken(flag, value, names)
            takers = [user for user in users_of(flag) if user.description.name in names]
            if takers and all(self._list_says(taker, flag) for taker in takers):
                own = config_flag(takers[0])
                raise UsageError(
                    f"`{as_flag(flag)}` and `{own}` say the same: {value}", hint="leave one of the two out"
                )

    def _check_is_taken(self, flag: str, value: Any, names: Collection[str]) -> None:
        """UsageError for a drafter's flag that none of the drafters of these names takes."""
        users = users_of(flag)
        if not users or any(user.description.name in names for user in users):
            return
        of_models = [user for user in users if any(one.has_flag(flag) for one in user.models().values())]
        if not names and len(users) > 1 and not of_models and self.leader is not None and self.leader.has_algorithms:
            raise UsageError(
                f"`{as_flag(flag)}` needs a drafter: {value}",
                hint=f"`--spec-decode-algo {_AUTO}` chooses a drafter, or leave the flag out",
            )
        spec = next((user for user in of_models if user.reads(value)), users[0])
        chooser = example_of(spec) if self.leader is None else self._chosen_by(spec)
        raise UsageError(
            f"no drafter takes `{as_flag(flag)}`: {value}",
            hint=f"`{chooser}` chooses a drafter that does, or leave the flag out",
        )

    def _list_says(self, spec: type[DrafterSpec], flag: str) -> bool:
        """True if the list of the drafter's own flag gives the same value as this flag of leader mode."""
        own = self.lists.get(spec.description.name)
        said = () if own is None else own.values
        return any(name in said for name, setting in spec.settings().items() if setting.leader_flag == flag)


def _chosen_names(given: list[str], drafters: str | None) -> list[str]:
    if drafters is None:
        if len(given) > 1:
            raise UsageError(
                f"{' and '.join(f'`{config_flag(DRAFTERS[name])}`' for name in given)} cannot be given together",
                hint="choose one drafter, or have the best of their drafts sent: `--drafters auto`",
            )
        return given
    names = parse_drafter_names(drafters)
    for name in given:
        if name not in names:
            raise UsageError(
                f"`{config_flag(DRAFTERS[name])}` is given, and `--drafters` does not name {name}: {drafters}",
                hint=f"`--drafters {','.join([*names, name])}`, or leave the flag out",
            )
    return names


def _with_article(title: str) -> str:
    """`a draft model`, `an EAGLE-3 head`, `an MTP head`."""
    is_spelt = title.split()[0].isupper()
    return f"{'an' if title[0] in (_SPOKEN_AS_VOWELS if is_spelt else 'aeiouAEIOU') else 'a'} {title}"
