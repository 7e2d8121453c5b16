"""The story families of the arithmetic problems: what can happen in each, as data.

A family is about one running total. An opening puts down the first amount, events change it, and every operation has a step that works it
out. In the templates `{n}` is an event's operand, `{eq}` the step's equation ("48 + 9 = 57"), `{who}` and `{friend}` are names and `{item}`
is the thing counted; an opening's amounts are `{a}`, `{b}`, `{c}` and `{d}`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """One thing that happens to the total.

    Attributes:
        op: `+`, `-`, `x` or `/`.
        text: The sentence of the question.
        step: The line of the answer.
    """

    op: str
    text: str
    step: str


@dataclass(frozen=True)
class Family:
    """A kind of story.

    Attributes:
        items: What may be counted, plural.
        start: Opening with one amount, `{a}`, and no operation.
        groups: Opening with `{a}` groups of `{b}`: one multiplication.
        group_step: The step of that opening.
        second: A second set of groups beside the first, `{c}` groups of `{d}`: a multiplication and an addition.
        second_steps: The two steps of the second set.
        events: What may follow.
        questions: How the question may be asked.
    """

    items: tuple[str, ...]
    start: tuple[str, ...]
    groups: str
    group_step: str
    second: str
    second_steps: tuple[str, str]
    events: tuple[Event, ...]
    questions: tuple[str, ...]


NAMES = (
    "Ada", "Ben", "Carla", "David", "Elif", "Farah", "Goran", "Hana", "Ivan", "Julia", "Kofi", "Lena",
    "Mia", "Noah", "Olga", "Pedro", "Rosa", "Sam", "Tara", "Yusuf",
)  # fmt: skip

FAMILIES = {
    "collection": Family(
        items=("stamps", "marbles", "cards", "shells", "stickers"),
        start=("{who} has {a} {item} in a collection.", "{who} starts a collection with {a} {item}."),
        groups="{who} has {a} albums with {b} {item} in each.",
        group_step="The albums hold {eq} {item}.",
        second="There are also {c} tins with {d} {item} in each.",
        second_steps=("The tins hold {eq} {item}.", "Albums and tins together hold {eq} {item}."),
        events=(
            Event("+", "{friend} gives {who} {n} more {item}.", "With the gift from {friend}, {who} has {eq} {item}."),
            Event("+", "{who} finds {n} more {item} in a drawer.", "With those from the drawer there are {eq} {item}."),
            Event("-", "{who} loses {n} of them.", "After the loss {who} has {eq} {item}."),
            Event("-", "{who} swaps {n} of them for a toy.", "After the swap {eq} {item} are left."),
            Event("x", "A year later the collection is {n} times as large.", "A year later there are {eq} {item}."),
            Event("/", "{who} splits them into {n} equal sets and keeps one set.", "One set is {eq} {item}."),
        ),
        questions=("How many {item} does {who} have now?", "How many {item} are in the collection now?"),
    ),
    "bakery": Family(
        items=("rolls", "muffins", "loaves", "cookies", "buns"),
        start=("A bakery has {a} {item} on its shelves.", "{who} bakes {a} {item} in the morning."),
        groups="{who} bakes {a} trays of {b} {item}.",
        group_step="The trays hold {eq} {item}.",
        second="{friend} bakes {c} pans of {d} {item} as well.",
        second_steps=("The pans hold {eq} {item}.", "Trays and pans together hold {eq} {item}."),
        events=(
            Event("+", "Then {n} more {item} come out of the oven.", "With the fresh ones there are {eq} {item}."),
            Event("+", "A second baker brings {n} {item}.", "With the second baker's there are {eq} {item}."),
            Event("-", "The shop sells {n} {item} before noon.", "After the sale there are {eq} {item}."),
            Event("-", "{n} of the {item} are burnt and thrown away.", "Without the burnt ones there are {eq} {item}."),
            Event("x", "For a feast the bakery makes {n} times that number instead.", "The feast needs {eq} {item}."),
            Event("/", "The {item} are packed into {n} equal boxes and one box is put aside.", "One box holds {eq} {item}."),
        ),
        questions=("How many {item} is that in the end?", "How many {item} are there to count at the end?"),
    ),
    "library": Family(
        items=("books", "magazines", "novels", "comics"),
        start=("A small library owns {a} {item}.", "There are {a} {item} in the reading room."),
        groups="A library has {a} shelves with {b} {item} on each.",
        group_step="The shelves hold {eq} {item}.",
        second="In the cellar {c} crates hold {d} {item} each.",
        second_steps=("The crates hold {eq} {item}.", "Shelves and crates together hold {eq} {item}."),
        events=(
            Event("+", "Readers bring back {n} {item}.", "After the returns there are {eq} {item}."),
            Event("+", "The town pays for {n} new {item}.", "With the new ones there are {eq} {item}."),
            Event("-", "{who} borrows {n} {item}.", "After {who} leaves there are {eq} {item}."),
            Event("-", "{n} worn {item} are taken out.", "Without the worn ones there are {eq} {item}."),
            Event("x", "After a merger the stock is {n} times as big.", "The merger makes it {eq} {item}."),
            Event("/", "The {item} are shared equally by {n} branches, and we look at one branch.", "One branch gets {eq} {item}."),
        ),
        questions=("How many {item} are there now?", "What is the number of {item} now?"),
    ),
    "bus": Family(
        items=("passengers", "people", "travellers"),
        start=("A train leaves the station with {a} {item}.", "There are {a} {item} on a ferry."),
        groups="A train has {a} cars with {b} {item} in each.",
        group_step="The cars carry {eq} {item}.",
        second="Behind it are {c} more cars with {d} {item} in each.",
        second_steps=("The cars behind carry {eq} {item}.", "All the cars together carry {eq} {item}."),
        events=(
            Event("+", "At the next stop {n} {item} get on.", "After the stop there are {eq} {item} on board."),
            Event("+", "A tour guide joins with a group of {n} {item}.", "With the group there are {eq} {item} on board."),
            Event("-", "At the market {n} {item} get off.", "After the market {eq} {item} are on board."),
            Event("-", "{n} of the {item} change to another line.", "After the change {eq} {item} are on board."),
            Event("x", "On a holiday {n} times that number travel.", "On the holiday it is {eq} {item}."),
            Event("/", "At the border they are sent to {n} equal queues, and {who} counts one queue.", "One queue has {eq} {item}."),
        ),
        questions=("How many {item} is that at last?", "What number of {item} does {who} write down at last?"),
    ),
    "savings": Family(
        items=("dollars", "coins", "euros"),
        start=("{who} has {a} {item} in a jar.", "{who} has saved {a} {item}."),
        groups="{who} works {a} days and earns {b} {item} a day.",
        group_step="The work brings {who} {eq} {item}.",
        second="{friend} works {c} days for {d} {item} a day, and they pool their money.",
        second_steps=("The work brings {friend} {eq} {item}.", "Pooled, that is {eq} {item}."),
        events=(
            Event("+", "A birthday brings {n} {item}.", "With the birthday money it is {eq} {item}."),
            Event("+", "Selling an old bike brings {n} {item} more.", "With the bike sold it is {eq} {item}."),
            Event("-", "A new lamp costs {n} {item}.", "After paying for the lamp {eq} {item} are left."),
            Event("-", "{n} {item} go to a charity.", "After the gift to charity {eq} {item} are left."),
            Event("x", "With a lucky deal the money becomes {n} times as much.", "The deal turns it into {eq} {item}."),
            Event("/", "The money is divided equally among {n} cousins, {who} among them.", "Each cousin gets {eq} {item}."),
        ),
        questions=("How many {item} does {who} have in the end?", "How much money, in {item}, does {who} end up with?"),
    ),
    "garden": Family(
        items=("tomatoes", "apples", "pears", "lemons", "plums"),
        start=("{who} picks {a} {item} in the garden.", "There are {a} {item} in a basket."),
        groups="{who} picks {b} {item} from each of {a} trees.",
        group_step="From the trees come {eq} {item}.",
        second="From each of {c} bushes {friend} picks {d} {item} more.",
        second_steps=("From the bushes come {eq} {item}.", "Trees and bushes together give {eq} {item}."),
        events=(
            Event("+", "A neighbour adds {n} {item} to the basket.", "With the neighbour's there are {eq} {item}."),
            Event("+", "Later {who} picks {n} more {item}.", "After picking more there are {eq} {item}."),
            Event("-", "Birds spoil {n} of the {item}.", "The birds leave {eq} {item}."),
            Event("-", "{who} cooks {n} {item} for dinner.", "After dinner there are {eq} {item}."),
            Event("x", "Next summer the harvest is {n} times that.", "Next summer it is {eq} {item}."),
            Event(
                "/",
                "The {item} are put into {n} bags with the same number in each, and {friend} takes one bag.",
                "One bag has {eq} {item}.",
            ),
        ),
        questions=("How many {item} is that now?", "How many {item} do we count now?"),
    ),
    "reading": Family(
        items=("pages", "lines", "verses"),
        start=("{who} has to learn {a} {item}.", "On Monday {who} reads {a} {item}."),
        groups="{who} reads {b} {item} a day for {a} days.",
        group_step="In those days {who} reads {eq} {item}.",
        second="In the holidays {who} reads {d} {item} a day for {c} days.",
        second_steps=("In the holidays {who} reads {eq} {item}.", "That makes {eq} {item} together."),
        events=(
            Event("+", "The teacher adds {n} {item} to the list.", "With the teacher's list it is {eq} {item}."),
            Event("+", "In the evening {n} more {item} are read.", "With the evening it is {eq} {item}."),
            Event("-", "{n} of the {item} do not count.", "Without those it is {eq} {item}."),
            Event("-", "{who} forgets {n} {item} again.", "After forgetting some it is {eq} {item}."),
            Event("x", "{friend} reads {n} times as many {item}, and we turn to {friend}.", "For {friend} it is {eq} {item}."),
            Event("/", "All of it is spread evenly over {n} weeks, and we look at one week.", "One week has {eq} {item}."),
        ),
        questions=("How many {item} is that?", "What is the number of {item} to report?"),
    ),
    "school": Family(
        items=("chairs", "pencils", "tables", "rulers"),
        start=("A school orders {a} {item}.", "{who} counts {a} {item} in the hall."),
        groups="A school has {a} rooms with {b} {item} in each.",
        group_step="The rooms have {eq} {item}.",
        second="The old building has {c} rooms with {d} {item} in each.",
        second_steps=("The old building has {eq} {item}.", "The whole school has {eq} {item}."),
        events=(
            Event("+", "A truck delivers {n} {item}.", "After the delivery there are {eq} {item}."),
            Event("+", "Parents donate {n} {item}.", "With the donation there are {eq} {item}."),
            Event("-", "{n} {item} break during the term.", "The broken ones leave {eq} {item}."),
            Event("-", "The principal lends {n} {item} to a club.", "After lending some there are {eq} {item}."),
            Event("x", "A bigger school needs {n} times as many.", "The bigger school needs {eq} {item}."),
            Event("/", "They go to {n} classes in equal parts, and {who} is in one class.", "One class gets {eq} {item}."),
        ),
        questions=("How many {item} are meant at the end?", "How many {item} should {who} note at the end?"),
    ),
    "warehouse": Family(
        items=("bolts", "bottles", "lamps", "tiles", "cups"),
        start=("A warehouse stores {a} {item}.", "A shop receives {a} {item}."),
        groups="A van brings {a} crates of {b} {item}.",
        group_step="The crates hold {eq} {item}.",
        second="A second van brings {c} cartons of {d} {item}.",
        second_steps=("The cartons hold {eq} {item}.", "Both vans bring {eq} {item}."),
        events=(
            Event("+", "Another {n} {item} arrive by post.", "With the post there are {eq} {item}."),
            Event("+", "{who} finds {n} {item} behind a shelf.", "With the find there are {eq} {item}."),
            Event("-", "A customer buys {n} {item}.", "After that customer there are {eq} {item}."),
            Event("-", "{n} {item} are sent back as faulty.", "Without the faulty ones there are {eq} {item}."),
            Event("x", "The next order is {n} times as large, and we go on with that.", "The next order is {eq} {item}."),
            Event("/", "The stock is loaded evenly on {n} carts, and {who} pushes one cart.", "One cart carries {eq} {item}."),
        ),
        questions=("How many {item} is that at the end of the day?", "How many {item} are on the final note?"),
    ),
    "sports": Family(
        items=("points", "laps", "goals"),
        start=("{who} starts the season with {a} {item}.", "A team has {a} {item} so far."),
        groups="In each of {a} games {who} makes {b} {item}.",
        group_step="The games bring {eq} {item}.",
        second="In each of {c} cup games {who} makes {d} {item}.",
        second_steps=("The cup brings {eq} {item}.", "Games and cup together bring {eq} {item}."),
        events=(
            Event("+", "A good week adds {n} {item}.", "After the good week it is {eq} {item}."),
            Event("+", "The coach grants {n} {item} as a bonus.", "With the bonus it is {eq} {item}."),
            Event("-", "A penalty takes away {n} {item}.", "The penalty leaves {eq} {item}."),
            Event("-", "{n} {item} are declared void.", "Without the void ones it is {eq} {item}."),
            Event("x", "{friend} makes {n} times as many, and we follow {friend}.", "For {friend} it is {eq} {item}."),
            Event("/", "They are shared out equally among {n} players, and we look at one player.", "One player has {eq} {item}."),
        ),
        questions=("How many {item} stand at the end?", "How many {item} does the board show at the end?"),
    ),
}
