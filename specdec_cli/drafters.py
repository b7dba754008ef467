"""Names with which a package describes a drafter: docs/drafters.md has an example.

Nothing here imports torch; `specdec_cli` has `Draft` and `Sequence`, which the drafter itself imports.
"""

from runtime.drafters.lists import Entry as Entry
from runtime.drafters.lists import ListForm as ListForm
from runtime.drafters.spec import Description as Description
from runtime.drafters.spec import DrafterSpec as DrafterSpec
from runtime.drafters.spec import LeaderFlag as LeaderFlag
from runtime.drafters.spec import Setting as Setting
from runtime.drafters.specs import LookupDrafter as LookupDrafter
from runtime.drafters.specs import LookupLen as LookupLen
from runtime.drafters.specs import SharedPool as SharedPool
