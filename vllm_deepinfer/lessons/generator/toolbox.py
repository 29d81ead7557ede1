"""The tools that lessons offer, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..draw import Draw, Templates, commands
from ..lesson import Message
from ..values import file_name, person, place, sentence, title, unknown
from ..words import DAYS, ITEMS, LANGUAGES, ROOMS, SKIES

Arguments = dict[str, str | int | bool]


@dataclass(frozen=True)
class Tool:
    """A tool, how one asks for it, and what comes back.

    Attributes:
        parameters: JSON type by name, all of them required.
        wordings: with the arguments in braces by name.
        arguments: draws them. result: of the call. answer: what the model says of it.
    """

    name: str
    description: str
    parameters: tuple[tuple[str, str], ...]
    wordings: Templates
    arguments: Callable[[Draw], Arguments]
    result: Callable[[Draw, Arguments], str]
    answer: Callable[[Arguments, str], str]

    def schema(self) -> Message:
        """As in `tools` of a request."""
        properties = {name: {"type": kind} for name, kind in self.parameters}
        return {
            "name": self.name,
            "description": self.description,
            "parameters": {"type": "object", "properties": properties, "required": list(properties)},
        }


def _done(draw: Draw, arguments: Arguments) -> str:
    return "ok"


WEATHER = Tool(
    "get_weather",
    "Get the weather of a city.",
    (("city", "string"),),
    commands(
        (
            "tell me the weather in {city}",
            "get the weather in {city}",
            "check the weather in {city}",
            "show the weather of {city}",
            "give me the weather for {city}",
        ),
        (
            "What is the weather in {city}?",
            "What is the weather like in {city}?",
            "How is the weather in {city}?",
            "what's the weather in {city}",
            "What's the weather like in {city} today?",
            "Weather in {city}?",
            "weather {city}",
            "Is it raining in {city}?",
            "Is it warm in {city}?",
            "I want to know the weather in {city}.",
        ),
        ("Please tell me the weather in {city}.", "How's the weather in {city}?"),
    ),
    lambda draw: {"city": place(draw)},
    lambda draw, arguments: f"{draw.of(SKIES)}, {draw.rng.randint(1, 35)} degrees",
    lambda arguments, result: f"In {arguments['city']} it is {result}.",
)
FORECAST = Tool(
    "get_forecast",
    "Get the weather of a city for some days.",
    (("city", "string"), ("days", "integer")),
    commands(
        (
            "give me the forecast for {city} for the next {days} days",
            "give me the forecast for {city} for {days} days",
            "get a forecast for {city}, {days} days",
            "show the {days} day forecast of {city}",
        ),
        (
            "Forecast for {city}, {days} days.",
            "What is the forecast for {city} for {days} days?",
            "What will the weather be in {city} in the next {days} days?",
        ),
        ("Please give me the forecast for {city} for {days} days.",),
    ),
    lambda draw: {"city": place(draw), "days": draw.number("days", 2, 20)},
    lambda draw, arguments: draw.of(SKIES),
    lambda arguments, result: f"For {arguments['days']} days it will be {result} in {arguments['city']}.",
)
TIMER = Tool(
    "set_timer",
    "Set a timer.",
    (("minutes", "integer"),),
    commands(
        (
            "set a timer for {minutes} minutes",
            "start a timer of {minutes} minutes",
            "set the timer to {minutes} minutes",
            "wake me in {minutes} minutes",
            "tell me when {minutes} minutes are over",
        ),
        ("Timer for {minutes} minutes, please.", "Timer, {minutes} minutes.", "{minutes} minutes timer"),
        ("Please set a timer for {minutes} minutes.",),
    ),
    lambda draw: {"minutes": draw.number("minutes", 1, 99)},
    _done,
    lambda arguments, result: f"The timer is set for {arguments['minutes']} minutes.",
)
SONG = Tool(
    "play_song",
    "Play a song.",
    (("title", "string"),),
    commands(
        (
            "play the song {title}",
            "play {title}",
            "play me {title}",
            "put on {title}",
            "listen to {title}",
            "hear the song {title}",
        ),
        (
            'Play "{title}".',
            "The song {title}, please.",
            "Let me hear {title}.",
            "I would love to hear {title}.",
        ),
        ("Please play the song {title}.", "I want to hear {title}."),
    ),
    lambda draw: {"title": title(draw)},
    _done,
    lambda arguments, result: f"Now playing {arguments['title']}.",
)
LIGHT = Tool(
    "set_light",
    "Turn a light on or off.",
    (("room", "string"), ("on", "boolean")),
    commands(
        (
            "turn {state} the light in the {room}",
            "turn the light in the {room} {state}",
            "switch {state} the {room} light",
            "switch {state} the light in the {room}",
            "put the {room} light {state}",
        ),
        ("Light {state} in the {room}.", "The light in the {room} should be {state}."),
        ("Please turn {state} the light in the {room}.",),
    ),
    lambda draw: {"room": draw.of(ROOMS), "on": draw.chance(0.5)},
    _done,
    lambda arguments, result: (
        f"The light in the {arguments['room']} is {'on' if arguments['on'] else 'off'}."
    ),
)
CALL = Tool(
    "call_person",
    "Call a person.",
    (("name", "string"),),
    commands(
        ("call {name}", "phone {name}", "ring {name}", "give {name} a call", "speak to {name}"),
        ("Call {name} on the phone.", "I have to call {name}.", "Get me {name}."),
        ("Call {name} now.", "I want to call {name}."),
    ),
    lambda draw: {"name": person(draw)},
    _done,
    lambda arguments, result: f"Calling {arguments['name']}.",
)
EVENT = Tool(
    "add_event",
    "Add an event to the calendar.",
    (("day", "string"), ("person", "string")),
    commands(
        (
            "add a meeting with {person} on {day}",
            "plan a meeting with {person} on {day}",
            "meet {person} on {day}",
            "put {person} into my calendar on {day}",
        ),
        ("I meet {person} on {day}.", "Meeting with {person} on {day}.", "On {day} I see {person}."),
        ("Please add a meeting with {person} on {day}.",),
    ),
    lambda draw: {"day": draw.of(DAYS), "person": person(draw)},
    _done,
    lambda arguments, result: f"You meet {arguments['person']} on {arguments['day']}.",
)
BUY = Tool(
    "add_to_list",
    "Add an item to the shopping list.",
    (("item", "string"), ("count", "integer")),
    commands(
        (
            "add {count} {item} to the list",
            "put {count} {item} on the shopping list",
            "buy {count} {item}",
            "put {count} {item} on the list",
        ),
        ("We need {count} {item}.", "{count} {item} for the list.", "I am out of {item}, I need {count}."),
        ("Please add {count} {item} to the shopping list.",),
    ),
    lambda draw: {"item": draw.of(ITEMS), "count": draw.number("count", 1, 99)},
    _done,
    lambda arguments, result: f"Added {arguments['count']} {arguments['item']}.",
)
SEND = Tool(
    "send_message",
    "Send a message to a person.",
    (("person", "string"), ("text", "string")),
    commands(
        (
            "send {person} the message {text}",
            'send a message to {person}: "{text}"',
            "tell {person}: {text}",
            "write to {person}: {text}",
            'text {person} "{text}"',
        ),
        ("Message to {person}: {text}",),
        ("Please send a message to {person}: {text}",),
    ),
    lambda draw: {"person": person(draw), "text": sentence(draw, 2, 8)},
    _done,
    lambda arguments, result: f"I sent the message to {arguments['person']}.",
)
SEARCH = Tool(
    "search",
    "Search the web.",
    (("query", "string"),),
    commands(
        ("search for {query}", "search the web for {query}", "look up {query} on the web", "google {query}"),
        ('Search "{query}".', "What does the web say about {query}?"),
        ("Please search the web for {query}.",),
    ),
    lambda draw: {"query": sentence(draw, 1, 1) if draw.chance(0.2) else sentence(draw, 3, 6)},
    lambda draw, arguments: sentence(draw, 3, 8),
    lambda arguments, result: f"I found: {result}.",
)
TRANSLATE = Tool(
    "translate",
    "Translate a text.",
    (("text", "string"), ("language", "string")),
    commands(
        (
            "translate {text} into {language}",
            'translate "{text}" to {language}',
            "say {text} in {language}",
            "write {text} in {language}",
        ),
        ("What is {text} in {language}?", 'How do you say "{text}" in {language}?'),
        ("Please translate {text} into {language}.",),
    ),
    lambda draw: {"text": sentence(draw, 3, 8), "language": draw.of(LANGUAGES)},
    lambda draw, arguments: " ".join(unknown(draw).lower() for _ in range(draw.rng.randint(2, 4))),
    lambda arguments, result: f"In {arguments['language']} it is: {result}.",
)
READ = Tool(
    "read_file",
    "Read a file.",
    (("path", "string"),),
    commands(
        ("read the file {path}", "read {path}", "open {path}", "show me the file {path}", "show {path}"),
        ("What is in {path}?", "What does the file {path} say?", "Look into {path}."),
        ("Please read the file {path}.",),
    ),
    lambda draw: {"path": file_name(draw)},
    lambda draw, arguments: sentence(draw, 3, 10),
    lambda arguments, result: f"The file {arguments['path']} says: {result}.",
)
TOOLS = (WEATHER, FORECAST, TIMER, SONG, LIGHT, CALL, EVENT, BUY, SEND, SEARCH, TRANSLATE, READ)
