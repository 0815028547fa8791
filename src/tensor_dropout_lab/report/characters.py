"""Characters as LaTeX: the special ones escaped, symbols as commands, so that a document stays plain ASCII.

Written here because no maintained package does it without running LaTeX, and pdflatex stops at most of these symbols.
"""

from __future__ import annotations

import re
import unicodedata

LONG_WORD = 20  # characters: in longer words, paths perhaps, lines may break
PLAIN_IN_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "'": r"\textquotesingle{}",
    "`": r"\textasciigrave{}",
    "[": "{[}",  # after a line's end in a table it would be read as an option
    "]": "{]}",
    "*": "{*}",
    "\u00a0": "~",
    "\u202f": r"\,",
    "\u2009": r"\,",
    "\u200b": "",
    "\ufe0e": "",
    "\ufe0f": "",
    "\u00ad": r"\-",
    "\u2044": "/",
    "–": "--",
    "—": "---",
    "…": r"\ldots{}",
    "‘": r"\textquoteleft{}",
    "’": r"\textquoteright{}",
    "“": r"\textquotedblleft{}",
    "”": r"\textquotedblright{}",
    "„": r"\quotedblbase{}",
    "«": r"\guillemotleft{}",
    "»": r"\guillemotright{}",
    "°": r"\textdegree{}",
    "§": r"\S{}",
    "©": r"\textcopyright{}",
    "®": r"\textregistered{}",
    "™": r"\texttrademark{}",
    "€": r"\texteuro{}",
    "£": r"\textsterling{}",
    "•": r"\textbullet{}",
    "·": r"\textperiodcentered{}",
    "†": r"\dag{}",
    "ß": r"\ss{}",
    "æ": r"\ae{}",
    "Æ": r"\AE{}",
    "ø": r"\o{}",
    "Ø": r"\O{}",
    "œ": r"\oe{}",
    "Œ": r"\OE{}",
    "ł": r"\l{}",
    "Ł": r"\L{}",
    "ı": r"\i{}",
}
MATHS_IN_LATEX = {
    "±": r"\pm",
    "∓": r"\mp",
    "×": r"\times",
    "÷": r"\div",
    "−": "-",
    "∞": r"\infty",
    "≥": r"\geq",
    "≤": r"\leq",
    "≫": r"\gg",
    "≪": r"\ll",
    "≠": r"\neq",
    "≈": r"\approx",
    "≡": r"\equiv",
    "∼": r"\sim",
    "∝": r"\propto",
    "→": r"\rightarrow",
    "←": r"\leftarrow",
    "↔": r"\leftrightarrow",
    "↑": r"\uparrow",
    "↓": r"\downarrow",
    "⇒": r"\Rightarrow",
    "∈": r"\in",
    "∑": r"\sum",
    "∏": r"\prod",
    "√": r"\surd",
    "∂": r"\partial",
    "∇": r"\nabla",
    "∘": r"\circ",
    "⊗": r"\otimes",
    "⊙": r"\odot",
    "‖": r"\|",
    "ℓ": r"\ell",
    "ε": r"\varepsilon",
    "ϵ": r"\epsilon",
    "ς": r"\varsigma",
    "ϕ": r"\varphi",
    "ϑ": r"\vartheta",
    "ο": "o",
    "µ": r"\mu",
    "✓": r"\checkmark",
    "✗": r"\times",
    "✕": r"\times",
    "⚠": r"\triangle",
}
GREEK = "alpha beta gamma delta zeta eta theta iota kappa lamda mu nu xi pi rho sigma tau upsilon phi chi psi omega"
GREEK_CAPITALS = "gamma delta theta lamda xi pi sigma upsilon phi psi omega"
for _name in GREEK.split():
    MATHS_IN_LATEX[unicodedata.lookup(f"greek small letter {_name}")] = "\\" + _name.replace("lamda", "lambda")
for _name in GREEK_CAPITALS.split():
    _command = "\\" + _name.replace("lamda", "lambda").capitalize()
    MATHS_IN_LATEX[unicodedata.lookup(f"greek capital letter {_name}")] = _command
ACCENTS_IN_LATEX = {
    "\u0300": "`",
    "\u0301": "'",
    "\u0302": "^",
    "\u0303": "~",
    "\u0304": "=",
    "\u0306": "u",
    "\u0307": ".",
    "\u0308": '"',
    "\u030a": "r",
    "\u030b": "H",
    "\u030c": "v",
    "\u0327": "c",
    "\u0328": "k",
}


def escape_latex(text: str) -> str:
    r"""The text as LaTeX in ASCII, in one line: symbols as commands, accents composed, the unknown by its code point.

    Example:
        >>> escape_latex("5 % of x_1 & ±0.3, θ ≥ ½")
        '5 \\% of x\\_1 \\& \\ensuremath{\\pm}0.3, \\ensuremath{\\theta} \\ensuremath{\\geq} 1/2'
        >>> escape_latex("25³ Gödel, 中")
        '25\\textsuperscript{3} G\\"{o}del, {[}U+4E2D{]}'
    """
    words = re.split(r"[ \t\n\r\f\v]+", unicodedata.normalize("NFC", text).strip())
    return " ".join(_word_in_latex(word) for word in words)


def _word_in_latex(word: str) -> str:
    characters = [_character_in_latex(character) for character in word]
    if len(word) > LONG_WORD:
        characters = [
            f"{latex}\\allowbreak{{}}" if character in "/_.=," else latex
            for character, latex in zip(word, characters, strict=True)
        ]
    return re.sub(r"-(?=-)", "-{}", "".join(characters))


def _character_in_latex(character: str) -> str:
    if character in PLAIN_IN_LATEX:
        return PLAIN_IN_LATEX[character]
    if character in MATHS_IN_LATEX:
        return rf"\ensuremath{{{MATHS_IN_LATEX[character]}}}"
    if " " <= character <= "~":
        return character
    kind, *parts = unicodedata.decomposition(character).split() or [""]
    if kind.startswith("<"):  # superscripts, fractions and the like
        plain = "".join(_character_in_latex(chr(int(part, 16))) for part in parts)
        command = {"<super>": r"\textsuperscript", "<sub>": r"\textsubscript"}.get(kind)
        return f"{command}{{{plain}}}" if command else plain
    if parts and (accent := ACCENTS_IN_LATEX.get(chr(int(parts[0], 16)))):
        return rf"\{accent}{{{_character_in_latex(chr(int(kind, 16)))}}}"
    return f"{{[}}U+{ord(character):04X}{{]}}"
