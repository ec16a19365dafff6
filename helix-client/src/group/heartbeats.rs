//! The background task of a member: heartbeats and commits, until the member leaves.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use helix_proto::log::v1::{ErrorReason, HeartbeatRequest, HeartbeatResponse, LeaveRequest};
use helix_proto::time;
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{debug, warn};

use super::committer::{Committer, FinalCommit};
use super::membership::{HeartbeatContent, MemberHandle};
use crate::call_spec::{CallSpec, Repeat};
use crate::error::{Error, Result};

/// Heartbeat interval if the service does not state one.
const INTERVAL_DEFAULT: Duration = Duration::from_millis(500);

/// Longest wait of the service for a join's first partitions.
const JOIN_WAIT_MAX: Duration = Duration::from_secs(3);

/// Longest wait of the service for a change: a third of the longest session timeout.
const WAIT_MAX: Duration = Duration::from_secs(200);

/// Minimum timeout of one attempt of a heartbeat.
const ATTEMPT_MIN: Duration = Duration::from_millis(500);

/// Longest wait for a join in flight when the member stops. A join that arrives after the leave
/// would add the member again.
const JOIN_END_MAX: Duration = Duration::from_secs(2);

/// Constant part of a member's heartbeats.
#[derive(Debug, Clone)]
pub(super) struct MemberSettings {
    pub(super) topics: Vec<String>,
    pub(super) static_name: String,
    pub(super) client_name: String,
    pub(super) session_timeout: Duration,
}

/// Request to stop a member.
#[derive(Debug)]
pub(super) struct EndRequest {
    pub(super) leaves: bool,
    pub(super) done: Option<oneshot::Sender<Result<()>>>,
}

/// Runs a member until its consumer is closed or dropped.
pub(super) async fn run_member(
    membership: Arc<MemberHandle>,
    committer: Arc<Committer>,
    settings: MemberSettings,
) {
    let mut guard = MemberGuard { membership: &membership, committer: &committer, is_done: false };
    let heartbeats = send_heartbeats(&membership, &settings);
    tokio::pin!(heartbeats);
    let commits = committer.run();
    tokio::pin!(commits);
    let mut has_heartbeats = true;
    let FinalCommit { end, committed } = loop {
        tokio::select! {
            ended = &mut commits => break ended,
            () = &mut heartbeats, if has_heartbeats => has_heartbeats = false,
        }
    };
    guard.is_done = true;
    membership.stopping.send_replace(true);
    if has_heartbeats {
        heartbeats.await;
    }
    let left = match end.leaves && !membership.has_failed() {
        true => leave(&membership).await,
        false => Ok(()),
    };
    let outcome = committed.and(left);
    match end.done {
        // Ignored: the caller no longer waits.
        Some(done) => drop(done.send(outcome)),
        None => {
            if let Err(error) = outcome {
                warn!(group = membership.group, %error, "a dropped consumer did not end cleanly");
            }
        }
    }
}

/// Closes the committer when the task of the member stops, and fails the consumer if it was
/// unexpected.
struct MemberGuard<'a> {
    membership: &'a MemberHandle,
    committer: &'a Committer,
    is_done: bool,
}

impl Drop for MemberGuard<'_> {
    fn drop(&mut self) {
        self.committer.close();
        if !self.is_done {
            let message = "the task of the group's member has ended";
            self.membership.fail(Error::known(ErrorReason::Internal, message), true);
        }
    }
}

async fn leave(membership: &MemberHandle) -> Result<()> {
    let MemberHandle { client, group, member_id, .. } = membership;
    let call = CallSpec::new("leave group", Repeat::Always);
    let left = client.call_coordinator(group, call, |node| {
        let request = LeaveRequest { group: group.clone(), member_id: member_id.clone() };
        async move { node.group().leave(request).await }
    });
    left.await.map(drop)
}

/// Sends heartbeats until the member stops or fails permanently.
async fn send_heartbeats(membership: &MemberHandle, settings: &MemberSettings) {
    let mut stopping = membership.stopping.subscribe();
    // A static member replaces an earlier process once. A later process that replaced it has
    // priority.
    let mut takes_over = !settings.static_name.is_empty();
    // True if a heartbeat was abandoned since the last response. The next one is not abandoned, or
    // frequent changes would keep the member from a response until its session expires.
    let mut has_abandoned = false;
    loop {
        let report = membership.report();
        let sent_at = Mutex::new(Instant::now());
        let wait = match report.is_settled && !has_abandoned {
            true if report.epoch == 0 => (settings.session_timeout / 3).min(JOIN_WAIT_MAX),
            true => (settings.session_timeout / 3).min(WAIT_MAX),
            false => Duration::ZERO,
        };
        let can_abandon = report.epoch != 0 && !wait.is_zero();
        let heartbeat = heartbeat(membership, settings, &report, wait, takes_over, &sent_at);
        tokio::pin!(heartbeat);
        let response = loop {
            tokio::select! {
                biased;
                () = stopped(&mut stopping) => {
                    if report.epoch == 0 {
                        let _ = timeout(JOIN_END_MAX, heartbeat).await;
                    }
                    return;
                }
                response = &mut heartbeat => break Some(response),
                () = reported_since(membership, report.revision), if can_abandon => {
                    has_abandoned = true;
                    break None;
                }
                () = expiry(membership) => {
                    membership.expire(Instant::now());
                    // The session has expired, so the heartbeat is useless.
                    if membership.epoch() != report.epoch {
                        break None;
                    }
                }
            }
        };
        let Some(response) = response else { continue };
        let due = match response {
            Ok(response) => {
                takes_over = false;
                has_abandoned = false;
                let interval = response.next_heartbeat.and_then(|it| time::duration(it).ok());
                let sent_at = *sent_at.lock().unwrap_or_else(PoisonError::into_inner);
                membership.on_response(report.epoch, sent_at, response);
                // Ignores an interval beyond the range of the clock.
                let due = interval.and_then(|interval| sent_at.checked_add(interval));
                due.unwrap_or(sent_at + INTERVAL_DEFAULT)
            }
            Err(error) => match error.reason {
                Some(ErrorReason::UnknownMember | ErrorReason::StaleMemberEpoch) => {
                    membership.lose(report.epoch, &error);
                    Instant::now() + membership.client.shared.jitter.draw(u32::MAX)
                }
                // A full disk does not cost the partitions: space may become free.
                Some(ErrorReason::DiskFull) => {
                    warn!(group = membership.group, %error, "retrying a heartbeat");
                    Instant::now() + membership.client.config().backoff_max
                }
                _ if error.retryable => {
                    debug!(group = membership.group, %error, "retrying a heartbeat");
                    Instant::now() + membership.client.shared.jitter.draw(u32::MAX)
                }
                _ => {
                    membership.lose(report.epoch, &error);
                    membership.fail(error, true);
                    return;
                }
            },
        };
        // A change is reported at once.
        while membership.revision() == report.revision || membership.epoch() == 0 {
            tokio::select! {
                biased;
                () = stopped(&mut stopping) => return,
                () = sleep_until(due) => break,
                () = membership.reported.notified() => {}
                () = expiry(membership) => membership.expire(Instant::now()),
            }
        }
    }
}

async fn stopped(stopping: &mut watch::Receiver<bool>) {
    // The sender lives as long as the membership.
    let _ = stopping.wait_for(|is_stopping| *is_stopping).await;
}

/// Waits until the report has changed since this revision.
async fn reported_since(membership: &MemberHandle, revision: u64) {
    while membership.revision() == revision {
        membership.reported.notified().await;
    }
}

async fn expiry(membership: &MemberHandle) {
    match membership.next_expiry() {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

async fn heartbeat(
    membership: &MemberHandle,
    settings: &MemberSettings,
    report: &HeartbeatContent,
    wait: Duration,
    takes_over: bool,
    sent_at: &Mutex<Instant>,
) -> Result<HeartbeatResponse> {
    let is_join = report.epoch == 0;
    let has_failed = AtomicBool::new(false);
    let request = HeartbeatRequest {
        group: membership.group.clone(),
        member_id: membership.member_id.clone(),
        member_epoch: report.epoch,
        topics: if is_join { settings.topics.clone() } else { Vec::new() },
        owned: report.owned.clone(),
        static_name: if is_join { settings.static_name.clone() } else { String::new() },
        session_timeout: is_join.then(|| settings.session_timeout.try_into().ok()).flatten(),
        take_over: is_join && takes_over,
        paused: report.paused.clone(),
        max_wait: None,
        client_name: if is_join { settings.client_name.clone() } else { String::new() },
    };
    // A node that does not respond must leave time for other nodes within the session.
    let attempt_max = (settings.session_timeout / 3).max(ATTEMPT_MIN);
    let call = CallSpec { wait, attempt_max, ..CallSpec::new("group heartbeat", Repeat::Always) };
    let call = membership.client.call_coordinator(&membership.group, call, |node| {
        // The session counts from the start of the attempt that succeeded.
        *sent_at.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        // A failed attempt, such as one at a node that no longer coordinates, may have taken a
        // third of the session. Another wait would take the rest of it.
        let wait = if has_failed.swap(true, Ordering::Relaxed) { Duration::ZERO } else { wait };
        let request = HeartbeatRequest { max_wait: wait.try_into().ok(), ..request.clone() };
        async move { node.group().heartbeat(request).await }
    });
    call.await
}
