"""FilterService: users deploy, list and delete WebAssembly modules by which pulls filter. On the admin lane, which compiles them, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from protomq.v1.filter_service_pb2 import (
    DeleteFilterRequest,
    DeleteFilterResponse,
    DeployFilterRequest,
    DeployFilterResponse,
    FilterModule,
    GetFilterRequest,
    GetFilterResponse,
    ListFiltersRequest,
    ListFiltersResponse,
)
from protomq_runtime.errors import invalid_argument, too_many

from .admin_service import page_size_of
from .filter_modules import MODULES_MAX, FilterModules, is_module_name
from .filter_searches import filter_failure
from .filters.errors import FilterError, FilterUnavailableError
from .filters.languages import MODULE
from .filters.wasm_filter import WasmFilter
from .store_errors import tells_store_errors

if TYPE_CHECKING:
    from protomq_runtime.call import CallContext


class FilterService:
    """Implements protomq.v1.FilterService. `changed` is called with the name of a module that was replaced or deleted. `store_id`: of this
    broker, for slaves that copy its modules.
    """

    def __init__(
        self, modules: FilterModules, changed: Callable[[str], None], store_id: int
    ) -> None:
        self._modules = modules
        self._changed = changed
        self._store_id = store_id

    @tells_store_errors
    def deploy_filter(
        self, request: DeployFilterRequest, context: CallContext
    ) -> DeployFilterResponse:
        """Stores a module that can be used."""
        _check_name("name", request.name)
        try:
            WasmFilter(request.module)
        except (FilterError, FilterUnavailableError) as error:
            raise filter_failure(error, MODULE) from error
        if not self._modules.write(request.name, request.module):
            text = f"{MODULES_MAX} modules are deployed already; delete one that nobody uses"
            raise too_many("filter modules", MODULES_MAX, text)
        self._changed(request.name)
        return DeployFilterResponse()

    @tells_store_errors
    def list_filters(self, request: ListFiltersRequest, context: CallContext) -> ListFiltersResponse:
        """Returns a page of modules, sorted by name. The page token is the last name of the previous page."""
        size = page_size_of(request.page_size)
        if request.page_token:
            _check_name("page_token", request.page_token)
        modules = [module for module in self._modules.all() if module.name > request.page_token]
        return ListFiltersResponse(
            modules=[FilterModule(**module._asdict()) for module in modules[:size]],
            next_page_token=modules[size - 1].name if len(modules) > size else "",
            store_id=self._store_id,
        )

    @tells_store_errors
    def delete_filter(
        self, request: DeleteFilterRequest, context: CallContext
    ) -> DeleteFilterResponse:
        """Deletes a module. A pull that is under way finishes with the module with which it began."""
        _check_name("name", request.name)
        deleted = self._modules.delete(request.name)
        self._changed(request.name)
        return DeleteFilterResponse(deleted=deleted)

    @tells_store_errors
    def get_filter(self, request: GetFilterRequest, context: CallContext) -> GetFilterResponse:
        """Returns a module. One that is not there is no error: it may have been deleted since it was listed."""
        _check_name("name", request.name)
        return GetFilterResponse(module=self._modules.find(request.name) or b"")


def _check_name(field: str, name: str) -> None:
    """Raises ServiceError if no module can have this name."""
    if not is_module_name(name):
        raise invalid_argument(field, "has 1 to 64 letters, digits, _ and -")
