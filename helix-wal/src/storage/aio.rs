//! Writes that leave the thread free while the device works: Linux's own asynchronous I/O, of
//! which this is all that is needed: one write at a time, waited for before the call returns.
//!
//! The only unsafe code of the log. What it has to keep: the kernel reads the caller's bytes until
//! the write has completed, so nothing gets past [`UnderWay`] before it has, and the four calls get
//! what `io_setup(2)`, `io_submit(2)`, `io_getevents(2)` and `io_destroy(2)` ask for.
#![allow(unsafe_code)]

use std::io;
use std::mem::zeroed;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::process::abort;
use std::ptr::null;
use std::time::Duration;

use libc::{SYS_io_destroy, SYS_io_getevents, SYS_io_setup, SYS_io_submit, c_long, syscall};

/// `IOCB_CMD_PWRITE` of `linux/aio_abi.h`.
const WRITE: u16 = 1;

/// `struct iocb` of `linux/aio_abi.h`, which is as long on every architecture. Where the two
/// halves of the second word stand depends on the order of bytes, but both are zero here.
#[repr(C)]
struct Request {
    data: u64,
    key_and_flags: u64,
    operation: u16,
    priority: i16,
    file: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    event_file: u32,
}

/// `struct io_event` of the same.
#[repr(C)]
struct Event {
    data: u64,
    request: u64,
    /// Bytes written, or an error's number below zero.
    outcome: i64,
    outcome_2: i64,
}

/// A queue of the kernel's for one write.
#[derive(Debug)]
pub(super) struct Queue {
    context: libc::c_ulong,
}

impl Queue {
    /// # Errors
    /// What the system says where it has no such queues, or none left (`fs.aio-max-nr`).
    pub(super) fn new() -> io::Result<Self> {
        let mut context: libc::c_ulong = 0;
        // SAFETY: the context is zero, as asked for, and outlives the call.
        told(unsafe { syscall(SYS_io_setup, 1 as c_long, &raw mut context) })?;
        Ok(Self { context })
    }

    /// Writes from the start of `data` at `offset`, and runs `meanwhile` as
    /// [`File::write_beside`](super::File::write_beside) says, every `interval` while it is wanted.
    /// How many bytes were written; `None`, with nothing done, where the kernel does not take it
    /// this way.
    pub(super) fn write(
        &mut self,
        file: BorrowedFd<'_>,
        data: &[u8],
        offset: u64,
        interval: Duration,
        meanwhile: &mut dyn FnMut() -> bool,
    ) -> Option<io::Result<usize>> {
        let offset = i64::try_from(offset).ok()?;
        let mut request = Request {
            data: 0,
            key_and_flags: 0,
            operation: WRITE,
            priority: 0,
            file: file.as_raw_fd() as u32,
            buffer: data.as_ptr() as u64,
            bytes: data.len() as u64,
            offset,
            reserved: 0,
            flags: 0,
            event_file: 0,
        };
        let mut requests = [&raw mut request];
        // SAFETY: the context is this queue's; the request, which the kernel copies, and the array
        // outlive the call. The file is open, and `data` is borrowed until `write` ends, before
        // which `under_way` has waited for the kernel to be done with it.
        let sent =
            unsafe { syscall(SYS_io_submit, self.context, 1 as c_long, requests.as_mut_ptr()) };
        told(sent).ok()?;
        let mut under_way = UnderWay { queue: self, outcome: None };
        while meanwhile() {
            if let Some(outcome) = under_way.wait(Some(interval)) {
                return Some(written(outcome));
            }
        }
        Some(written(under_way.wait_for_it()))
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: the context is this queue's and is not used again. Ignored: it can only fail for
        // a context that there is not.
        let _ = unsafe { syscall(SYS_io_destroy, self.context) };
    }
}

/// A write that the kernel has. However this ends, also by a panic, it is over then.
struct UnderWay<'a> {
    queue: &'a mut Queue,
    outcome: Option<i64>,
}

impl UnderWay<'_> {
    /// Waits until it is over, at most for `time`.
    fn wait(&mut self, time: Option<Duration>) -> Option<i64> {
        if self.outcome.is_some() {
            return self.outcome;
        }
        // SAFETY: all zeroes are such a time and such an event.
        let (mut limit, mut event) = unsafe { (zeroed::<libc::timespec>(), zeroed::<Event>()) };
        let limit = match time {
            Some(time) => {
                limit.tv_sec = time.as_secs() as libc::time_t;
                limit.tv_nsec = time.subsec_nanos().into();
                &raw const limit
            }
            None => null(),
        };
        // SAFETY: the context is this queue's, there is room for the one event asked for, and both
        // outlive the call; no limit is a null pointer.
        let events = told(unsafe {
            let (least, most) = (1 as c_long, 1 as c_long);
            syscall(SYS_io_getevents, self.queue.context, least, most, &raw mut event, limit)
        });
        match events {
            Ok(0) => {}
            Ok(_) => self.outcome = Some(event.outcome),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // By its manual a sign of wrong arguments; whether the kernel still reads the caller's
            // memory is unknown then, and nothing may be done with that any more.
            Err(_) => abort(),
        }
        self.outcome
    }

    fn wait_for_it(&mut self) -> i64 {
        loop {
            if let Some(outcome) = self.wait(None) {
                return outcome;
            }
        }
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.wait_for_it();
    }
}

fn told(result: c_long) -> io::Result<c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn written(outcome: i64) -> io::Result<usize> {
    usize::try_from(outcome).map_err(|_| io::Error::from_raw_os_error(-outcome as i32))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_write_lands_where_it_was_meant_to_and_what_fails_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let file = File::create(&path).unwrap();
        // A system without such queues says so; the log then waits for its writes.
        let mut queue = Queue::new().unwrap();
        let mut write = |file: &File, bytes: &[u8], offset| {
            queue.write(file.as_fd(), bytes, offset, Duration::from_micros(1), &mut || true)
        };
        assert_eq!(write(&file, b"hello", 3).unwrap().unwrap(), 5);
        assert_eq!(write(&file, b"", 0).unwrap().unwrap(), 0);
        let reader = File::open(&path).unwrap();
        let mut found = [1; 8];
        reader.read_exact_at(&mut found, 0).unwrap();
        assert_eq!(&found, b"\0\0\0hello");
        assert!(write(&reader, b"no", 0).is_none(), "not open for writing");
        assert!(write(&file, b"no", u64::MAX).is_none());
        // The kernel takes this one, and its outcome says what is wrong.
        let beyond = write(&file, b"no", i64::MAX as u64 - 8).unwrap().unwrap_err();
        assert_eq!(beyond.kind(), io::ErrorKind::FileTooLarge);
        // None of that keeps the queue from the next one.
        assert_eq!(write(&file, b"again", 0).unwrap().unwrap(), 5);
    }
}
