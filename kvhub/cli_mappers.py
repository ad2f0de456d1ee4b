"""The commands of an artifact's life: parse, call, print."""

from kvhub import console, tables
from kvhub.cli_options import Json, MapperArgument

__all__ = ["info", "list_mappers", "verify"]


def info(mapper: MapperArgument, as_json: Json = False) -> None:
    """Show what a mapper is, from its config; the tensors are not read.

    Example: kvhub info tiny-middle-to-large
    """
    from kvhub.package import read_config
    from kvhub.store import find_mapper

    path = find_mapper(mapper)
    data = read_config(path)[1]
    console.emit({"path": str(path), **data}, as_json, lambda: tables.show_config(str(path), data))


def list_mappers(as_json: Json = False) -> None:
    """List the mappers in the local store.

    Example: kvhub list
    """
    from kvhub.pipeline import list_store

    found = list_store()
    console.emit({"mappers": found}, as_json, lambda: tables.show_store(found))


def verify(mapper: MapperArgument, as_json: Json = False) -> None:
    """Check every file of a mapper against its manifest, and its tensors against its config.

    Example: kvhub verify tiny-middle-to-large
    """
    from kvhub.package import Manifest, load
    from kvhub.store import find_mapper

    path = find_mapper(mapper)
    load(path)
    manifest = Manifest.read(path)
    files = manifest.files
    result = {"path": str(path), "files": len(files), "size_bytes": manifest.size_bytes}
    console.emit({"verified": True, **result}, as_json, lambda: tables.show_files(str(path), files))
