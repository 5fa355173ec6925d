"""The dataparsers that nerfstudio finds through the entry points.

Apart from `methods`, because nerfstudio asks for these while its own datamanagers are still being imported: nothing
that needs a datamanager may be imported here. It is the first of our modules that `ns-train` comes to, long before it
knows what it is to do, so what shortens a start is here: see `quick_imports`.
"""

from ns_multigpu.plugin.launch import quick_imports

quick_imports.hasten()  # before anything else is imported

# isort: split

from nerfstudio.plugins.registry_dataparser import DataParserSpecification  # noqa: E402

from ns_multigpu.plugin.capture.city_dataparser import CityDataParserConfig  # noqa: E402

city = DataParserSpecification(
    config=CityDataParserConfig(),
    description="A procedural city of any size, rendered on demand",
)
