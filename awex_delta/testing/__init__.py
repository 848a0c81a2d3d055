"""Public fakes and helpers for tests: thread ranks, fault injection, Megatron on a CPU.

Importing it lets megatron-core be imported where there is no Triton; see `import_megatron`.
"""

from awex_delta.testing import import_megatron

import_megatron.install()
