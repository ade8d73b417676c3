"""Reports on a terminal: names from data are escaped, and are not markup."""

from __future__ import annotations

import io
from xml.dom import minidom

from rich.table import Table
from rich.text import Text

from kcdsl.verdict.text.console import SanitisingConsole, print_on

HOSTILE = "a\x1b[31mred\x07\u202eb[/b][red]\r"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_data_cannot_control_a_terminal() -> None:
    table = Table()
    table.add_column(Text(HOSTILE))
    table.add_row(Text(HOSTILE))
    for stream in (io.StringIO(), _Terminal()):
        print_on(stream, table, Text(f"{HOSTILE}\nnext line"))
        shown = stream.getvalue()
        assert "[31mred" in shown
        assert "[/b][red]" in shown
        assert "\nnext line" in shown
        for harmful in ("\x1b[31mred", "\x07", "\u202e", "\r"):
            assert harmful not in shown


def test_colours_of_the_report_are_kept() -> None:
    stream = _Terminal()
    console = SanitisingConsole(file=stream, force_terminal=True, color_system="standard")
    console.print(Text("held", style="green"))
    assert "\x1b[32mheld" in stream.getvalue()


def test_picture_with_a_hostile_name_is_valid_xml() -> None:
    console = SanitisingConsole(record=True, width=80, file=io.StringIO(), force_terminal=True)
    console.print(Text(HOSTILE))
    assert "red" in minidom.parseString(console.export_svg(title="x")).toxml()
