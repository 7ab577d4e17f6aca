"""The functions behind the commands, such as convert and tune. They return reports."""
