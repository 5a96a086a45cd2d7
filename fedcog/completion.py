"""Completion for shells: a script made of the parser once, so that no key press waits for torch to load."""

import argparse
from collections.abc import Iterable, Iterator, Mapping

from fedcog.flags import shown

POSIX = """\
_fedcog_words() {
  case "$1" in
TABLE
  esac
}
_fedcog() {
  local word flag= place=fedcog here="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"
  [ "$before" = "=" ] && before="${COMP_WORDS[COMP_CWORD-2]}"
  [ "$here" = "=" ] && here=
  for word in "${COMP_WORDS[@]:1:$((COMP_CWORD-1))}"; do
    case "$word" in -*) flag="$word" ;; esac
    [ -n "$(_fedcog_words "$place $word -")" ] && place="$place $word"
  done
  case "$here/$before" in
    -*) place="$place -" ;;
    */-*) place="$place $before" ;;
    *) [ -n "$(_fedcog_words "$place $flag +")" ] && place="$place $flag +" ;;
  esac
  COMPREPLY=($(compgen -W "$(_fedcog_words "$place")" -- "$here"))
}
complete -o default -F _fedcog fedcog
"""
FISH = """\
function _fedcog_words
  switch "$argv[1]"
TABLE
  end
end
function _fedcog
  set -l words (commandline -opc)
  set -l place fedcog
  set -l flag
  for word in $words[2..-1]
    string match -q -- '-*' $word; and set flag $word
    test -n "$(_fedcog_words "$place $word -")"; and set place "$place $word"
  end
  if string match -q -- '-*' (commandline -ct)
    set place "$place -"
  else if string match -q -- '-*' $words[-1]
    set place "$place $words[-1]"
  else if test -n "$(_fedcog_words "$place $flag +")"
    set place "$place $flag +"
  end
  _fedcog_words $place | string split ' '
end
complete -c fedcog -a '(_fedcog)'
"""
ZSH = """\
whence compdef >/dev/null || { autoload -Uz compinit && compinit; }
autoload -Uz bashcompinit && bashcompinit
"""
SCRIPTS = {"bash": POSIX, "zsh": ZSH + POSIX, "fish": FISH}


def script(shell: str, parser: argparse.ArgumentParser, named: Mapping[str, Iterable[str]]) -> str:
    """What a shell is to read so that it can complete commands, flags and their values; `named` has more of those."""
    form = "    case '{}'\n      echo '{}'" if shell == "fish" else "    '{}') echo '{}' ;;"
    table = [form.format(place, " ".join(found)) for place, found in words(parser, named) if found]
    return SCRIPTS[shell].replace("TABLE", "\n".join(table))


def words(
    parser: argparse.ArgumentParser, named: Mapping[str, Iterable[str]], place: str = "fedcog"
) -> Iterator[tuple[str, list[str]]]:
    """What may follow what: a command its actions or names, a command and `-` its flags, a flag its values.

    After a flag, `+` and one value there may be others, if it takes several.
    """
    yield f"{place} -", shown(parser)
    for action in parser._actions:
        values = str(action.metavar or "")
        choices = action.choices or (values[1:-1].split(",") if values.startswith("{") else ())
        for flag in action.option_strings:
            yield f"{place} {flag}", list(named.get(flag, choices))
            if action.nargs == "+":
                yield f"{place} {flag} +", list(named.get(flag, choices))
        if not action.option_strings:
            yield place, list(choices)
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from words(inner, named, f"{place} {name}")
