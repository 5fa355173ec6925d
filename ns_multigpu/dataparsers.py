"""The dataparsers that nerfstudio finds through the entry points.

Apart from `methods`, because nerfstudio asks for these while its own datamanagers are still being imported: nothing
that needs a datamanager may be imported here.
"""

from nerfstudio.plugins.registry_dataparser import DataParserSpecification

from ns_multigpu.plugin.capture.city_dataparser import CityDataParserConfig

city = DataParserSpecification(
    config=CityDataParserConfig(),
    description="A procedural city of any size, rendered on demand",
)
