"""The lease store on etcd v3. Importing this module needs the extra ``etcd``; the package itself does not."""

from endpoint_lifecycle._asyncio_etcd import EtcdLeaseStore

__all__ = ["EtcdLeaseStore"]
