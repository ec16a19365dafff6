//! Notices that the reader of standard output is gone, while a command has nothing to print.
//!
//! A write would fail, but a command that waits for records may not write for hours. Meanwhile a
//! member of a group would keep its partitions.

use std::io::stdout;
use std::os::fd::AsFd;
use std::thread;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use tokio::sync::oneshot;

use crate::output::StdoutClosed;

/// Resolves when standard output is a pipe, a socket or a terminal whose other end is closed. Never
/// resolves for a file.
pub(crate) async fn gone() -> StdoutClosed {
    let (sender, gone) = oneshot::channel();
    // The call blocks for as long as there is a reader. The thread ends with the process.
    let watch = thread::Builder::new().name("helix-stdout".to_owned()).spawn(move || {
        if wait_for_hangup(stdout()) {
            // Ignored: the command has ended.
            let _ = sender.send(());
        }
    });
    match watch {
        Ok(_) if gone.await.is_ok() => StdoutClosed,
        // Not known: a write reports it.
        _ => std::future::pending().await,
    }
}

/// Waits until the other end is closed. Returns false if that cannot be found out.
fn wait_for_hangup(output: impl AsFd) -> bool {
    // Errors and hang-ups are reported without a request for them.
    let mut watched = [PollFd::new(&output, PollFlags::empty())];
    loop {
        match poll(&mut watched, None) {
            Ok(_) => return watched[0].revents().intersects(PollFlags::ERR | PollFlags::HUP),
            Err(Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn closed_pipes_and_sockets_are_noticed() {
        let (reader, writer) = std::io::pipe().unwrap();
        let waiting = thread::spawn(move || wait_for_hangup(writer));
        drop(reader);
        assert!(waiting.join().unwrap());
        let (near, far) = UnixStream::pair().unwrap();
        let waiting = thread::spawn(move || wait_for_hangup(near));
        drop(far);
        assert!(waiting.join().unwrap());
    }
}
