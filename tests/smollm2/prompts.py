"""Twenty prompts of different kinds, and the runs that tests share."""

from __future__ import annotations

from typing import NamedTuple


class Prompt(NamedTuple):
    """A text, put through the chat template or continued as it stands."""

    kind: str
    text: str
    chat: bool = False


_REPORT = """The harbour commission met on the second Tuesday of the month to settle three questions that had been open
since the spring. The first was the depth of the eastern channel. Soundings taken in March showed between four and five
metres at low water, which is enough for the fishing fleet but not for the grain barges that the cooperative would like to
bring in after the harvest. Dredging half a metre would cost about as much as two years of mooring fees. The second was the
lamp on the north mole, which has failed eleven times since January. The keeper's notes blame the relay, the electrician
blames the salt, and the insurer blames the keeper. A sealed unit from another supplier has been lent for a trial. The third
was the market hall, whose roof leaks over the ice store. Members walked through the hall before the meeting and agreed that
the beams are sound and that only the tiles and the gutter on the seaward side need to be replaced. After two hours the
commission voted to dredge in October, to buy the sealed lamp if it lasts the summer, and to ask three builders for prices
on the roof. The chair thanked the members for their patience and reminded them that the minutes would be read aloud at the
next meeting, as they have been for more than a hundred years.

In short, the commission decided to"""

_CSV = """date,station,temperature_c,rain_mm
2021-03-01,North,4.5,0.0
2021-03-02,North,5.1,2.4
2021-03-03,North,3.9,11.2
2021-03-04,North,"""

PROMPTS = (
    Prompt("chat-question", "Why is the sky blue?", chat=True),
    Prompt("chat-advice", "I have eggs, rice and spinach. What can I cook tonight?", chat=True),
    Prompt("chat-rewrite", "Make this sentence more polite: Send me the report now.", chat=True),
    Prompt("chat-reason", "A train leaves at 9:40 and arrives at 11:05. How long does the journey take?", chat=True),
    Prompt("chat-list", "Name five animals that live in the sea, as a numbered list.", chat=True),
    Prompt("prose-story", "The old lighthouse had not been lit for thirty years when Maria first climbed its stairs."),
    Prompt("prose-fact", "The capital of France is"),
    Prompt("prose-science", "Photosynthesis is the process by which plants"),
    Prompt("prose-long", _REPORT),
    Prompt("code-python", "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n"),
    Prompt("code-c", "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n"),
    Prompt("code-sql", "SELECT name, COUNT(*) FROM orders\nWHERE"),
    Prompt("code-json", '{"name": "Ada", "born": 1815, "languages": ["English", "French"], "address": {'),
    Prompt("list", "Shopping list:\n- milk\n- bread\n- two onions\n-"),
    Prompt("numbers", "2, 4, 8, 16, 32, 64,"),
    Prompt("table", _CSV),
    Prompt("french", "Le petit chat dormait au soleil pendant que les enfants"),
    Prompt("german", "Die Würde des Menschen ist unantastbar. Sie zu achten und zu schützen ist"),
    Prompt("symbols", "日本の首都は東京です。😀 → \u00bd \u00d7 3 ="),
    Prompt("shortest", "A"),
)
assert len(PROMPTS) == 20
