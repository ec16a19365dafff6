//! State that the members of a run's consumer group share with the run that checks them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use helix_checker::GroupChecker;
use tokio::time::Instant;

/// Shared state of the group. Clones share it.
#[derive(Debug, Clone)]
pub struct GroupContext {
    /// The seed decides the shard, which follows from the name.
    name: Arc<str>,
    checker: Arc<Mutex<GroupChecker>>,
    /// Member ids of the running members, by slot.
    running: Arc<Mutex<BTreeMap<u32, String>>>,
    /// Slots whose members have had a response to a heartbeat since the group was left alone.
    answered: Arc<Mutex<BTreeSet<u32>>>,
    /// Ends of the members' sessions, by the members' own clocks.
    sessions: Arc<Mutex<BTreeMap<u32, Instant>>>,
    is_calm: Arc<AtomicBool>,
    is_stopped: Arc<AtomicBool>,
    /// Topics are no longer changed.
    has_fixed_topics: Arc<AtomicBool>,
    /// Number of the last commit of any member.
    commits: Arc<AtomicU64>,
}

impl GroupContext {
    pub fn new(seed: u64) -> Self {
        let name = format!("readers-{seed}").into();
        let (checker, running, answered, sessions) = Default::default();
        let (is_calm, is_stopped, has_fixed_topics, commits) = Default::default();
        Self {
            name,
            checker,
            running,
            answered,
            sessions,
            is_calm,
            is_stopped,
            has_fixed_topics,
            commits,
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the number of a new commit.
    pub fn next_commit(&self) -> u64 {
        self.commits.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub fn checker(&self) -> MutexGuard<'_, GroupChecker> {
        self.checker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the first violation.
    pub fn violation(&self) -> Option<String> {
        self.checker().violations().first().cloned()
    }

    /// Notes the end of a member's session.
    pub fn set_session(&self, member: u32, expires: Instant) {
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.insert(member, expires);
    }

    /// Lets members whose sessions are over stop reading, also those that wait for a response.
    pub fn end_sessions(&self) {
        let now = Instant::now();
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        let mut checker = self.checker();
        sessions.retain(|member, expires| {
            let is_open = now < *expires;
            if !is_open {
                checker.give_up_all(*member);
            }
            is_open
        });
    }

    /// Notes that a member runs in a slot, or that none does.
    pub fn set_running(&self, slot: u32, member_id: Option<&str>) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        match member_id {
            Some(member_id) => drop(running.insert(slot, member_id.to_owned())),
            None => drop(running.remove(&slot)),
        }
        self.answered().remove(&slot);
    }

    fn answered(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.answered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the member of a slot has had a response to a heartbeat.
    pub fn set_answered(&self, slot: u32) {
        self.answered().insert(slot);
    }

    /// Returns the running members that the group has not answered since it was left alone. Such
    /// a member is absent, or its connection broke: its session may end at any time.
    pub fn unanswered(&self) -> Vec<String> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let answered = self.answered();
        let waiting = running.iter().filter(|(slot, _)| !answered.contains(slot));
        waiting.map(|(_, member_id)| member_id.clone()).collect()
    }

    /// Returns the ids of the running members, in order.
    pub fn running(&self) -> Vec<String> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let mut ids: Vec<String> = running.values().cloned().collect();
        ids.sort_unstable();
        ids
    }

    /// From now on no member crashes, leaves or is absent, and no topic changes.
    pub fn calm_down(&self) {
        self.answered().clear();
        self.is_calm.store(true, Ordering::Relaxed);
    }

    pub fn is_calm(&self) -> bool {
        self.is_calm.load(Ordering::Relaxed)
    }

    pub fn fix_topics(&self) {
        self.has_fixed_topics.store(true, Ordering::Relaxed);
    }

    pub fn has_fixed_topics(&self) -> bool {
        self.has_fixed_topics.load(Ordering::Relaxed)
    }

    /// Lets all members commit and leave.
    pub fn stop(&self) {
        self.is_stopped.store(true, Ordering::Relaxed);
    }

    pub fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Relaxed)
    }
}
