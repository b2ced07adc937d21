"""References (`$ref`) in the schemas of tools, which become parts of larger schemas: there, pointers lead elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any
from urllib.parse import unquote, urljoin

_MAX_REFERENCES = 8  # that are followed one after the other
_MAX_CHAIN = 256  # references that lead to nothing but a reference
_SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
_VALUES = frozenset({"const", "enum", "default", "examples"})  # keywords whose values are not schemas
_PLACES = frozenset({"$id", "id", "$anchor", "$schema"})  # meaningless or harmful inside another schema


def standalone_schema(name: str, schema: Any) -> Any:
    """The schema of a tool as a separate schema.

    Raises:
        ValueError: a reference leads nowhere.
    """
    return next(standalone_parts(name, schema, [schema]))


def standalone_parts(name: str, schema: Any, parts: Iterable[Any]) -> Iterator[Any]:
    """Parts of a tool's schema, each as a separate schema.

    Raises:
        ValueError: a reference leads nowhere.
    """
    places = _Places(schema)
    for part in parts:
        copy, definitions = _Bundle(name, places).part(part)
        if isinstance(copy, dict):
            dialect = {key: schema[key] for key in ("$schema",) if key in schema}
            copy = {**dialect, **copy, **({"$defs": definitions} if definitions else {})}
        yield copy


def embed_schemas(schemas: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schemas of tools as parts of one schema, and the keywords which that schema needs at its root.

    Raises:
        ValueError: a reference leads nowhere.
    """
    parts: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    dialects = {str(schema.get("$schema", "")) for schema in schemas.values()}
    for index, (name, schema) in enumerate(schemas.items()):
        parts[name], more = _Bundle(name, _Places(schema), f"t{index}r", current=len(dialects) > 1).part(schema)
        definitions.update(more)
    dialect = dialects.pop() if len(dialects) == 1 else ""
    return parts, {
        **({"$schema": dialect} if dialect else {}),
        **({"$defs": definitions} if definitions else {}),
    }


def resolve_reference(part: Any, schema: Mapping[str, Any]) -> Any:
    """Return what a part of a schema refers to, with the keywords that the part adds; the part if it refers to nothing.

    Args:
        part: may be anything, as the client sent it.
        schema: the schema that references point into.
    """
    for _ in range(_MAX_REFERENCES):
        if not isinstance(part, Mapping) or not isinstance(part.get("$ref"), str):
            return part
        target = _at_pointer(schema, part["$ref"].removeprefix("#")) if part["$ref"].startswith("#") else None
        if not isinstance(target, Mapping):
            return part
        part = {**target, **{key: value for key, value in part.items() if key != "$ref"}}
    return part


class _Bundle:
    """Copy a part of a tool's schema, with the definitions that it refers to."""

    def __init__(self, name: str, places: _Places, prefix: str = "r", *, current: bool = False) -> None:
        """`prefix`: beginning of definition names. `current`: schemas of several JSON Schema versions become one."""
        self._name = name
        self._places = places
        self._prefix = prefix
        self._current = current
        self._keys: dict[str, str] = {}  # names of definitions by pointers
        self._waiting: list[tuple[str, Any, str]] = []  # definitions that are not copied yet, and their bases
        self._copies: dict[int, Any] = {}

    def part(self, part: Any) -> tuple[Any, dict[str, Any]]:
        """The part, with references to `#/$defs/...`, and these definitions."""
        try:
            copy = self._copy(part, "")
            definitions = {}
            while self._waiting:
                key, target, base = self._waiting.pop()
                definitions[key] = self._copy(target, base)
        except RecursionError as error:
            raise ValueError(f"The schema of the tool {self._name!r} is nested too deeply.") from error
        if isinstance(copy, dict):  # all that is referred to is among the new definitions
            copy = {key: value for key, value in copy.items() if key not in ("$defs", "definitions")}
        return copy, definitions

    def _copy(self, node: Any, base: str) -> Any:
        if isinstance(node, list):
            return [self._copy(member, base) for member in node]
        if not isinstance(node, Mapping):
            return node
        copy = self._copies.get(id(node))
        if copy is None:
            base = self._places.bases.get(id(node), base)
            copy = self._copies[id(node)] = {
                key: self._copied(key, value, base)
                for key, value in node.items()
                if key not in _PLACES or not isinstance(value, str)
            }
            if self._current and isinstance(copy.get("items"), list):
                copy["prefixItems"] = copy.pop("items")
                further_items = copy.pop("additionalItems", True)
                copy["items"] = further_items
        return copy

    def _copied(self, keyword: str, value: Any, base: str) -> Any:
        """The value of a keyword."""
        if keyword == "$ref" and isinstance(value, str):
            return f"#/$defs/{self._definition(value, base)}"
        if keyword in _VALUES:
            return value
        if keyword in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            return {name: self._copy(member, base) for name, member in value.items()}
        return self._copy(value, base)

    def _definition(self, reference: str, base: str) -> str:
        """The name of the definition which a reference leads to. `base`: pointer to the schema that it starts from."""
        pointer, target = self._target(reference, base)
        if pointer not in self._keys:
            self._keys[pointer] = f"{self._prefix}{len(self._keys)}"
            self._waiting.append((self._keys[pointer], target, self._places.base_of(pointer)))
            seen = {pointer}
            next_pointer = pointer
            node = target
            while isinstance(node, Mapping) and isinstance(node.get("$ref"), str):
                next_pointer, node = self._target(node["$ref"], self._places.base_of(next_pointer))
                if next_pointer in seen or len(seen) > _MAX_CHAIN:
                    raise ValueError(
                        f"In the tool {self._name!r}, {reference[:200]!r} is a circular $ref, or one that leads "
                        f"through more than {_MAX_CHAIN} others."
                    )
                seen.add(next_pointer)
        return self._keys[pointer]

    def _target(self, reference: str, base: str) -> tuple[str, Any]:
        """Pointer to the target of a reference, and the target."""
        uri, _, fragment = reference.partition("#")
        fragment = unquote(fragment)
        origin = self._places.origin(uri, base) if uri else base
        if origin is None:
            raise ValueError(
                f"The tool {self._name!r} refers to {reference[:200]!r}. References must lead to a part of its own "
                "schema, as in '#/$defs/Name'."
            )
        by_name = fragment != "" and fragment[0] != "/"
        pointer = self._places.anchors.get((origin, fragment)) if by_name else origin + fragment
        target = None if pointer is None else _at_pointer(self._places.schema, pointer)
        if pointer is None or not isinstance(target, Mapping | bool):
            raise ValueError(f"The tool {self._name!r} refers to {reference[:200]!r}, which its schema does not have.")
        return pointer, target


class _Places:
    """The schemas that references are resolved against: by `$id`, and by anchors."""

    def __init__(self, schema: Any) -> None:
        self.schema = schema

    def origin(self, uri: str, base: str) -> str | None:
        """Pointer to the schema with this `$id`, which may be relative to that at `base`."""
        return self._pointers.get(uri, self._pointers.get(urljoin(self._ids.get(base, ""), uri)))

    def base_of(self, pointer: str) -> str:
        """Pointer to the innermost schema with an `$id` around a pointer."""
        while pointer and pointer not in self._ids:
            pointer = pointer.rpartition("/")[0]
        return pointer

    @cached_property
    def _ids(self) -> dict[str, str]:
        """The `$id` of schemas, by pointers to them."""
        nodes = ((pointer, node.get("$id")) for pointer, node in _nodes(self.schema))
        return {at: identity.rstrip("#") for at, identity in nodes if isinstance(identity, str) and identity[:1] != "#"}

    @cached_property
    def _pointers(self) -> dict[str, str]:
        """Pointers to schemas by their `$id`."""
        return {identity: pointer for pointer, identity in self._ids.items()}

    @cached_property
    def bases(self) -> dict[int, str]:
        """Pointers to schemas with an `$id`, by the identity of their objects."""
        return {id(_at_pointer(self.schema, pointer)): pointer for pointer in self._ids}

    @cached_property
    def anchors(self) -> dict[tuple[str, str], str]:
        """Pointers to schemas with an `$anchor`, by their base and that name."""
        anchors = {}
        for pointer, node in _nodes(self.schema):
            for name in (node.get("$anchor"), node.get("$id")):
                if isinstance(name, str) and (name == node.get("$anchor") or name[:1] == "#"):
                    anchors[self.base_of(pointer), name.removeprefix("#")] = pointer
        return anchors


def _nodes(schema: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All objects in a schema, with pointers to them."""
    left = [("", schema)]
    while left:
        pointer, node = left.pop()
        if isinstance(node, Mapping):
            yield pointer, node
            left.extend((f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}", node[key]) for key in node)
        elif isinstance(node, list):
            left.extend((f"{pointer}/{index}", member) for index, member in enumerate(node))


def _at_pointer(schema: Any, pointer: str) -> Any:
    """Return what a JSON pointer leads to; None if there is nothing."""
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, Mapping):
            schema = schema.get(key)
        elif isinstance(schema, list) and key.isascii() and key.isdigit() and len(key) < 8 and int(key) < len(schema):
            schema = schema[int(key)]
        else:
            return None
    return schema
