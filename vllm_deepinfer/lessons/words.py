"""The little world that lessons speak of.

Values are made of words that occur everywhere: a value that is held out is a new combination of known tokens.
"""

from __future__ import annotations

import random


def words(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


# Each is one token, at the start of a line as well as behind a space.
KEYS = words(
    """
    address box buffer call check child city code context count data day default doc error file format frame
    header info item level line list log loop match message method mode module object option part path price
    process question range server size song start state test text thread time token type version work
    """
)
NOUNS = words("dog cat house street man woman tree boat road hat table book")
ITEMS = words("apples bottles books coins letters boxes tables flags hats trees")
WORDS = words(
    """
    blue cold dark early fast gold green happy heavy large late light long loud new old open plain quick quiet
    red rich round sharp short silver simple slow small soft strong sweet tall thick thin warm white wide wild
    young
    """
)
PLACES = tuple(
    f"{first} {second}"
    for first in ("North", "East", "West", "South", "Old", "New", "Red", "Green", "Long", "High")
    for second in ("Hill", "Lake", "Ford", "Port", "Bay", "Field", "Town", "Wood", "Bridge", "Gate")
)
FIRST_NAMES = words("Ada Ben Clara Dan Eva Finn Hana Ivo Jan Kim Leo Mia Ned Ola Pia Tom")
LAST_NAMES = words(
    "Adams Baker Clark Dale Evans Fisher Grant Hunt King Lane Moss Parker Reed Stone Ward Young"
)
NAMES = tuple(f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES)
SONGS = tuple(f"{word} {noun}" for word in WORDS for noun in NOUNS)
ROOMS = ("kitchen", "hall", "bedroom", "office", "garage")
LANGUAGES = words("Arabic Chinese Danish Dutch English French German Greek Italian Japanese Polish Spanish")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy")

# What lessons' users say of their own. A value is on one side of the split whole, so the lists are apart from
# each other and from those above: no held-out value is a part of a longer one that is learnt.
CITIES = words(
    """
    Amsterdam Athens Barcelona Berlin Boston Brussels Budapest Cairo Chicago Copenhagen Dallas Delhi
    Denver Dublin Florence Geneva Hamburg Helsinki Houston Istanbul Jakarta Kyoto Lagos Lima Lisbon
    London Lyon Madrid Manila Melbourne Miami Milan Montreal Moscow Mumbai Munich Nairobi Naples Osaka
    Oslo Paris Prague Rome Seattle Seoul Shanghai Singapore Stockholm Sydney Tokyo Toronto Vienna Warsaw
    Zurich
    """
)
PEOPLE = words(
    """
    Alice Amy Anna Bob Carol Charlie Daniel David Dora Emily Emma Frank George Grace Helen Henry Ivan
    Jack James Jane John Julia Kate Laura Lily Lucas Luis Maria Mark Mary Max Michael Nina Noah Olga
    Oscar Paul Peter Rosa Sam Sarah Simon Sofia Steve Susan Thomas Victor Wendy Yuki Zoe
    """
)
COMMON = words(
    """
    about above across after again air all also always and animal answer ask away back bad ball bank
    bear before begin behind best better bird body bread bring brother build busy buy came can carry
    chair children class clean clear clock close coffee come cook cross cut dance did dinner do doctor
    door down draw drink drive dry each ear east eat eight end even every eye face fall family far farm
    father feel few field fight fill fire fish five floor flower fly follow food foot forest four friend
    from front full game garden girl give go gone good got grass great ground grow had half hand hard
    has have head hear heart help her here high hill him his hold home hope horse hour how hundred ice
    if in into island its job jump keep know land last later laugh learn leave left life like listen
    little live look lost love made make many map may meet milk minute money moon more morning most
    mother mountain move music my near never next night nine north not nothing of off often once one
    only or other our out over own page paper people picture place plant play point pull push put rain
    read ready rest ride right river rock room run said same sand saw say school sea see seven she ship
    shop should show side sing sister sit six sky sleep snow so some soon south stand star stay step
    stop story sun sure swim take talk teach team tell ten than thank that the their them then these
    they thing think this three through to together told too took top town travel try turn two under
    until up us use very visit voice wait walk wall want was watch water way we week well went were west
    what when where which while who why will wind window winter with wonder word world would write year
    yes you your
    """
)
_ONSETS = words("b c d f g h j k l m n p r s t v w z br ch cl cr dr fl gr pl pr sh sl sp st th tr")
_VOWELS = words("a e i o u a e i o u ai ea ee ia io ou")
_CODAS = ("", "", "", *words("n r l s t m d k ck nd st th x"))


def invented(rng: random.Random) -> str:
    """A word that nobody knows, of two or three syllables, in lower case: three to six tokens."""
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + (rng.choice(_CODAS) if last or rng.random() < 0.3 else "")
        for last in ((False, True) if rng.random() < 0.7 else (False, False, True))
    )
