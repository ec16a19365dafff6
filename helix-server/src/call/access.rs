//! The caller of a call, and the right that it was admitted with.

use std::sync::{Arc, OnceLock};

use super::connection::ClientConnection;
use super::method::{MethodKind, MethodRow};
use crate::access::Caller;
use crate::limits::QUOTE_BYTES_MAX;
use crate::log::{AccessOperation, AccessResource, ResourceKind};
use crate::quote::cut;

/// The caller of a call, and its description for the audit log.
#[derive(Debug)]
pub(crate) struct CallLogin {
    /// `None` for a caller without credentials.
    pub(crate) caller: Option<Caller>,
    pub(crate) user_agent: Box<str>,
}

/// The caller of one call, and the right that the call was admitted with.
#[derive(Debug)]
pub struct CallAccess {
    login: Arc<CallLogin>,
    connection: Arc<ClientConnection>,
    /// Set by the first check of a control operation or a stream.
    granted: OnceLock<(AccessOperation, OwnedResource)>,
    /// `None` for a path that is no method of the public services.
    row: Option<&'static MethodRow>,
}

/// A resource with its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnedResource {
    kind: ResourceKind,
    name: Box<str>,
}

impl OwnedResource {
    pub fn as_resource(&self) -> AccessResource<'_> {
        AccessResource::new(self.kind, &self.name)
    }
}

impl CallAccess {
    pub(crate) fn new(
        login: Arc<CallLogin>,
        connection: Arc<ClientConnection>,
        row: Option<&'static MethodRow>,
    ) -> Self {
        Self { login, connection, granted: OnceLock::new(), row }
    }

    /// Returns the caller; `None` for one without credentials.
    pub fn caller(&self) -> Option<&Caller> {
        self.login.caller.as_ref()
    }

    pub fn user_agent(&self) -> &str {
        &self.login.user_agent
    }

    /// Returns the client's address.
    pub fn peer(&self) -> String {
        self.connection.peer().to_string()
    }

    /// Notes a right that was checked. Does not allocate for appends.
    pub fn grant(&self, operation: AccessOperation, resource: AccessResource<'_>) {
        if self.row.is_some_and(|row| row.kind != MethodKind::Data) {
            self.granted.get_or_init(|| {
                let name = cut(resource.name(), QUOTE_BYTES_MAX).into();
                (operation, OwnedResource { kind: resource.kind(), name })
            });
        }
    }

    pub fn granted(&self) -> Option<&(AccessOperation, OwnedResource)> {
        self.granted.get()
    }

    pub(crate) fn row(&self) -> Option<&'static MethodRow> {
        self.row
    }
}
