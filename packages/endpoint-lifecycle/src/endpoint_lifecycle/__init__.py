"""Who may publish an endpoint, and who may use it.

Layout:
    _record.py      the published record and its strict reading
    _state.py       an owner's states and their table
    _owner.py       the owner side: estimation, capability, publication, admission, draining, retiring
    _directory.py   the router side, pure: every rule
    _slots.py       what it keeps its books in: slots, pools, flights, reservations
    _views.py       configuration, statuses, audit and statistics as plain data
    _asyncio.py     the router side on an event loop
    _discovery.py   where servers come from: interface of sources and stores, the book that compares
    _asyncio_discovery.py  static list, in-memory store, reconciler, publisher
    _lease_table.py a lease store's state, pure
    _file_store.py  a shared folder with such a state, blocking
    _asyncio_file_store.py  the lease store made of it
    _etcd.py        etcd v3, blocking; the only file that imports etcd3gw
    _asyncio_etcd.py  the lease store made of it
    etcd.py         its public name
    _backoff.py     idle waiting for threads
    _ids.py         63-bit request ids
    _http.py        bodies and status codes for a web server
    _errors.py      the error tree
    testing.py      fake clock, fake transport, schedule explorer
"""

from endpoint_lifecycle.__about__ import __version__
from endpoint_lifecycle._asyncio import (
    AsyncEndpointDirectory,
    AsyncIdleBackoff,
    AsyncReservation,
    ReleaseNotice,
    ReservedStream,
)
from endpoint_lifecycle._asyncio_discovery import (
    AsyncLeasePublisher,
    AsyncReconciler,
    MemoryLeaseStore,
    PublisherStatistics,
    ReconcilerStatistics,
    StaticServers,
)
from endpoint_lifecycle._asyncio_file_store import FileLeaseStore
from endpoint_lifecycle._backoff import BackoffSchedule, BackoffStatistics, IdleBackoff
from endpoint_lifecycle._directory import EndpointDirectory
from endpoint_lifecycle._discovery import (
    BookStatistics,
    LeaseStore,
    Registration,
    RegistryBook,
    ServerSource,
    Snapshot,
    StoreEvent,
    decode_registration,
    registration_key,
)
from endpoint_lifecycle._errors import (
    AlreadyOwned,
    ConfigError,
    DirectoryClosed,
    Draining,
    EndpointError,
    EndpointTimeout,
    EstimationNotClosed,
    IdSpaceExhausted,
    InFlight,
    InvalidTransition,
    LocalProtocolError,
    NoServer,
    NotFinal,
    NotReady,
    NotSent,
    Overloaded,
    ProtocolViolation,
    RecordInvalid,
    RefreshFailed,
    RemoteProtocolError,
    ReservationError,
    ServerGone,
    StaleGeneration,
    StoreCompacted,
    StoreError,
    StoryEntry,
    Unavailable,
)
from endpoint_lifecycle._http import (
    check_generation,
    cluster_info_body,
    error_body,
    http_status,
    refusal_of,
    reservations_body,
    server_info_body,
)
from endpoint_lifecycle._ids import DurableRequestIds, RequestIdGenerator, split_request_id
from endpoint_lifecycle._owner import (
    Admission,
    EndpointOwner,
    EndpointSlot,
    EstimationAccount,
    EstimationRuntime,
    OwnerStatistics,
    PublishCapability,
    SlotView,
    new_generation,
)
from endpoint_lifecycle._record import (
    PROTOCOL_VERSION,
    EndpointProfile,
    EndpointRecord,
    address_fault,
    parse_record,
    record_from_disaggregated_params,
    unknown_fields,
)
from endpoint_lifecycle._slots import (
    Candidate,
    Effects,
    Flight,
    PickPolicy,
    PickRequest,
    Reservation,
    Ticket,
)
from endpoint_lifecycle._state import TRANSITIONS, OwnerEvent, OwnerState
from endpoint_lifecycle._views import (
    DirectoryAudit,
    DirectoryConfig,
    DirectoryStatistics,
    Load,
    LoadView,
    ReservationState,
    ReservationView,
    ServerStatus,
    ServerView,
)

__all__ = [
    "__version__",
    # records
    "PROTOCOL_VERSION",
    "EndpointProfile",
    "EndpointRecord",
    "address_fault",
    "parse_record",
    "record_from_disaggregated_params",
    "unknown_fields",
    # owner side
    "Admission",
    "EndpointOwner",
    "EndpointSlot",
    "EstimationAccount",
    "EstimationRuntime",
    "OwnerEvent",
    "OwnerState",
    "OwnerStatistics",
    "PublishCapability",
    "SlotView",
    "TRANSITIONS",
    "new_generation",
    # router side
    "AsyncEndpointDirectory",
    "AsyncReservation",
    "Candidate",
    "DirectoryAudit",
    "DirectoryConfig",
    "DirectoryStatistics",
    "Effects",
    "EndpointDirectory",
    "Flight",
    "Load",
    "LoadView",
    "PickPolicy",
    "PickRequest",
    "ReleaseNotice",
    "Reservation",
    "ReservationState",
    "ReservationView",
    "ReservedStream",
    "ServerStatus",
    "ServerView",
    "Ticket",
    # discovery (EtcdLeaseStore: ``from endpoint_lifecycle.etcd import EtcdLeaseStore``, extra ``etcd``)
    "AsyncLeasePublisher",
    "AsyncReconciler",
    "BookStatistics",
    "FileLeaseStore",
    "LeaseStore",
    "MemoryLeaseStore",
    "PublisherStatistics",
    "ReconcilerStatistics",
    "Registration",
    "RegistryBook",
    "ServerSource",
    "Snapshot",
    "StaticServers",
    "StoreEvent",
    "decode_registration",
    "registration_key",
    # idle and ids
    "AsyncIdleBackoff",
    "BackoffSchedule",
    "BackoffStatistics",
    "DurableRequestIds",
    "IdleBackoff",
    "RequestIdGenerator",
    "split_request_id",
    # web
    "check_generation",
    "cluster_info_body",
    "error_body",
    "http_status",
    "refusal_of",
    "reservations_body",
    "server_info_body",
    # errors
    "AlreadyOwned",
    "ConfigError",
    "DirectoryClosed",
    "Draining",
    "EndpointError",
    "EndpointTimeout",
    "EstimationNotClosed",
    "IdSpaceExhausted",
    "InFlight",
    "InvalidTransition",
    "LocalProtocolError",
    "NoServer",
    "NotFinal",
    "NotReady",
    "NotSent",
    "Overloaded",
    "ProtocolViolation",
    "RecordInvalid",
    "RefreshFailed",
    "RemoteProtocolError",
    "ReservationError",
    "ServerGone",
    "StaleGeneration",
    "StoreCompacted",
    "StoreError",
    "StoryEntry",
    "Unavailable",
]
