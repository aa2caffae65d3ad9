"""Finds out how a chat template reads message content: as text, or as a list of parts it loops over.

Decided from the template's syntax tree, by following names: what a loop over `messages` yields is a message, `content` of a
message is content, and so is every name or macro parameter that is given content. A loop over content means parts.
"""

from __future__ import annotations

import jinja2
from jinja2 import nodes

from kvferry_server.settings import ContentFormat


def detect_content_format(environment: jinja2.Environment, source: str) -> ContentFormat:
    """Return OPENAI when the template loops over a message's content, else STRING. Raises jinja2.TemplateSyntaxError."""
    return _Tracer(environment.parse(source)).result()


class _Tracer:
    """Names that hold lists of messages, messages and content; grown until nothing new is found."""

    def __init__(self, tree: nodes.Template) -> None:
        self._tree = tree
        self._lists = {"messages"}
        self._messages: set[str] = set()
        self._content: set[str] = set()

    def result(self) -> ContentFormat:
        while self._grow():
            pass
        loops = self._tree.find_all(nodes.For)
        parts = any(self._is_content(loop.iter) for loop in loops)
        return ContentFormat.OPENAI if parts else ContentFormat.STRING

    def _grow(self) -> bool:
        before = len(self._lists), len(self._messages), len(self._content)
        for loop in self._tree.find_all(nodes.For):
            if isinstance(loop.target, nodes.Name) and self._is_list(loop.iter):
                self._messages.add(loop.target.name)
        for assignment in self._tree.find_all(nodes.Assign):
            if isinstance(assignment.target, nodes.Name):
                self._learn(assignment.target.name, assignment.node)
        macros = {macro.name: macro for macro in self._tree.find_all(nodes.Macro)}
        for call in self._tree.find_all(nodes.Call):
            macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
            if macro is not None:
                for parameter, argument in zip(macro.args, call.args, strict=False):
                    self._learn(parameter.name, argument)
                for keyword in call.kwargs:
                    self._learn(keyword.key, keyword.value)
        return before != (len(self._lists), len(self._messages), len(self._content))

    def _learn(self, name: str, value: nodes.Node) -> None:
        if self._is_content(value):
            self._content.add(name)
        elif self._is_message(value):
            self._messages.add(name)
        elif self._is_list(value):
            self._lists.add(name)

    def _is_list(self, node: nodes.Node) -> bool:
        if isinstance(node, nodes.Name):
            return node.name in self._lists
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return self._is_list(node.node)
        if isinstance(node, nodes.CondExpr):
            return self._is_list(node.expr1) or (node.expr2 is not None and self._is_list(node.expr2))
        return isinstance(node, nodes.Filter) and node.node is not None and self._is_list(node.node)

    def _is_message(self, node: nodes.Node) -> bool:
        if isinstance(node, nodes.Name):
            return node.name in self._messages
        return isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice) and self._is_list(node.node)

    def _is_content(self, node: nodes.Node) -> bool:
        if isinstance(node, nodes.Name):
            return node.name in self._content
        if isinstance(node, nodes.Getattr):
            return node.attr == "content" and self._is_message(node.node)
        if isinstance(node, nodes.Getitem):
            key = node.arg
            return isinstance(key, nodes.Const) and key.value == "content" and self._is_message(node.node)
        if isinstance(node, nodes.Filter):
            return node.node is not None and self._is_content(node.node)
        return False
