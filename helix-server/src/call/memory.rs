//! Memory of one call.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use tokio::time::Instant;

use super::access::CallAccess;
use super::connection::{ClientConnection, RequestPermit};
use super::{ClientLoad, LoadPermit};
use crate::access::{CallShare, CallSlot, QuotaMeter};
use crate::{limits, sync};

/// Memory of one call: its requests until they are handled, its responses until they are read.
#[derive(Debug)]
pub struct CallMemory {
    load: Arc<ClientLoad>,
    connection: Arc<ClientConnection>,
    /// Covers what was read from the log and not yet sent.
    response: Mutex<Option<LoadPermit>>,
    /// Covers what has arrived and is not yet handled.
    request: Mutex<Option<RequestPermit>>,
    /// True if other calls send the same bytes, which have a permit of their own.
    has_shared_responses: AtomicBool,
    /// The caller; `None` if callers are not checked.
    access: Option<CallAccess>,
    slot: Option<CallSlot>,
    _permit: Option<LoadPermit>,
}

impl CallMemory {
    /// Holds the permit of the call until it is dropped.
    pub fn new(
        load: &Arc<ClientLoad>,
        connection: &Arc<ClientConnection>,
        permit: Option<LoadPermit>,
    ) -> Arc<Self> {
        Self::of_caller(load, connection, permit, None, None)
    }

    /// Like [`Self::new`], for a call that is counted in a share, and whose caller is checked.
    pub fn of_caller(
        load: &Arc<ClientLoad>,
        connection: &Arc<ClientConnection>,
        permit: Option<LoadPermit>,
        slot: Option<CallSlot>,
        access: Option<CallAccess>,
    ) -> Arc<Self> {
        let (load, connection) = (load.clone(), connection.clone());
        connection.change_calls(|count| count + 1);
        Arc::new(Self {
            load,
            connection,
            response: Mutex::default(),
            request: Mutex::default(),
            has_shared_responses: AtomicBool::new(false),
            access,
            slot,
            _permit: permit,
        })
    }

    /// Returns the meter of the caller's quota; `None` for a caller without credentials.
    pub fn quota_meter(&self) -> Option<Arc<QuotaMeter>> {
        Some(self.access()?.caller()?.meter().clone())
    }

    /// Returns the caller; `None` if callers are not checked.
    pub fn access(&self) -> Option<&CallAccess> {
        self.access.as_ref()
    }

    pub fn load(&self) -> &Arc<ClientLoad> {
        &self.load
    }

    /// Returns the share of the call's principal or address; `None` for a call without one.
    pub fn share(&self) -> Option<Arc<CallShare>> {
        Some(self.slot.as_ref()?.share().clone())
    }

    pub fn connection(&self) -> &Arc<ClientConnection> {
        &self.connection
    }

    /// Keeps the permit of a request until [`Self::release_request`] or the end of the call.
    pub fn keep_request(&self, permit: RequestPermit) {
        let mut request = sync::lock(&self.request);
        match &mut *request {
            Some(request) => request.merge(permit),
            None => *request = Some(permit),
        }
    }

    /// Releases the permits of the requests so far: they are in a log, or answered.
    pub fn release_request(&self) {
        *sync::lock(&self.request) = None;
    }

    /// Notes that the call sends bytes that have their own permit, since other calls send them too.
    pub fn share_responses(&self) {
        self.has_shared_responses.store(true, Ordering::Relaxed);
    }

    /// Keeps the permit of a response until the response was sent and read.
    pub fn keep_response(&self, permit: LoadPermit) {
        let mut response = self.lock();
        match &mut *response {
            Some(response) => response.merge(permit),
            None => *response = Some(permit),
        }
    }

    /// Returns bytes of a response that hold their permit, and count as unread, until dropped.
    pub fn track_response(&self, bytes: Bytes) -> Bytes {
        let kept = self.lock().take();
        if kept.is_none() && bytes.len() < limits::RESPONSE_COUNTED_BYTES {
            return bytes;
        }
        let permit = match kept {
            Some(mut permit) => {
                permit.shrink_to(bytes.len());
                Some(permit)
            }
            None => self.load.try_acquire_response(bytes.len()),
        };
        self.track(bytes, permit)
    }

    /// Like [`Self::track_response`] for a part of a message.
    ///
    /// Each part takes its share of the kept permit, which covers at most all parts together.
    pub fn track_response_part(&self, bytes: Bytes) -> Bytes {
        let mut kept = self.lock();
        let permit = kept.as_mut().map(|permit| permit.split(bytes.len()));
        let is_last = kept.take_if(|rest| rest.bytes() == 0).is_some();
        drop(kept);
        // The call's own share covers a small part, unless it is the last one.
        if !is_last && bytes.len() < limits::RESPONSE_COUNTED_BYTES {
            return bytes;
        }
        let is_shared = self.has_shared_responses.load(Ordering::Relaxed);
        let needs_permit = permit.is_none() && !is_shared;
        let acquired = needs_permit.then(|| self.load.try_acquire_response(bytes.len()));
        self.track(bytes, permit.or(acquired.flatten()))
    }

    fn track(&self, bytes: Bytes, permit: Option<LoadPermit>) -> Bytes {
        let id = self.connection.next_response.fetch_add(1, Ordering::Relaxed);
        self.connection.lock().push((Instant::now(), id, bytes.len()));
        let connection = self.connection.clone();
        Bytes::from_owner(UnreadResponse { bytes, id, connection, _permit: permit })
    }

    fn lock(&self) -> MutexGuard<'_, Option<LoadPermit>> {
        sync::lock(&self.response)
    }
}

impl Drop for CallMemory {
    fn drop(&mut self) {
        self.connection.change_calls(|count| count - 1);
    }
}

/// Bytes of a response; HTTP/2 drops them once the client's window took them.
#[derive(Debug)]
struct UnreadResponse {
    bytes: Bytes,
    id: u64,
    connection: Arc<ClientConnection>,
    _permit: Option<LoadPermit>,
}

impl AsRef<[u8]> for UnreadResponse {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for UnreadResponse {
    fn drop(&mut self) {
        let mut unread = self.connection.lock();
        if let Some(position) = unread.iter().position(|(_, id, _)| *id == self.id) {
            unread.swap_remove(position);
        }
        drop(unread);
        // Its trailers may be on their way.
        self.connection.change_calls(|count| count);
    }
}
