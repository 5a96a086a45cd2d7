"""Shell completion: a script generated from the parser, so that no key press starts Python."""

import argparse
from collections.abc import Iterable, Iterator, Mapping

from fedcog.cli.flags import visible_flags

POSIX = """\
_fedcog_words() {
  case "$1" in
TABLE
  esac
}
_fedcog() {
  local word flag= place=fedcog here="${COMP_WORDS[COMP_CWORD]}"
  local before="${COMP_WORDS[COMP_CWORD-1]}"
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


def script(shell: str, parser: argparse.ArgumentParser, names: Mapping[str, Iterable[str]]) -> str:
    """Return the completion script of a shell.

    Args:
        shell: bash, zsh or fish.
        parser: The parser of all commands.
        names: Values of flags that the parser does not restrict, by flag.

    Returns:
        The script.
    """
    form = "    case '{}'\n      echo '{}'" if shell == "fish" else "    '{}') echo '{}' ;;"
    table = [
        form.format(place, " ".join(found)) for place, found in completions(parser, names) if found
    ]
    return SCRIPTS[shell].replace("TABLE", "\n".join(table))


def completions(
    parser: argparse.ArgumentParser, names: Mapping[str, Iterable[str]], place: str = "fedcog"
) -> Iterator[tuple[str, list[str]]]:
    """Yield what may follow what.

    A command is followed by its actions or names, a command and `-` by its flags, a flag by its
    values. A flag and `+` stand for a flag that takes several values and has one already.

    Args:
        parser: The parser of a command.
        names: Values of flags that the parser does not restrict, by flag.
        place: The command so far.

    Yields:
        (place, words that may follow).
    """
    yield f"{place} -", visible_flags(parser)
    for action in parser._actions:
        values = str(action.metavar or "")
        choices = action.choices or (values[1:-1].split(",") if values.startswith("{") else ())
        for flag in action.option_strings:
            yield f"{place} {flag}", list(names.get(flag, choices))
            if action.nargs == "+":
                yield f"{place} {flag} +", list(names.get(flag, choices))
        if not action.option_strings:
            yield place, list(choices)
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from completions(inner, names, f"{place} {name}")
