//! Topics of one version of the cluster's state, for matching patterns without the state's lock.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use super::state::ClusterState;
use crate::limits::REMEMBERED_PATTERNS_MAX;
use crate::log::{TopicInfo, pattern_matches};
use crate::sync;

/// Topics of one version of the cluster's state.
#[derive(Debug, Default)]
pub struct TopicSnapshot {
    version: u64,
    /// Sorted by id.
    topics: Vec<Arc<TopicInfo>>,
    /// True for a pattern that matches a topic. Every heartbeat needs those of its member.
    has_match: Mutex<BTreeMap<Box<str>, bool>>,
}

impl TopicSnapshot {
    pub(super) fn of(state: &ClusterState) -> Self {
        let topics = state.all_topics().cloned().collect();
        Self { version: state.version(), topics, has_match: Mutex::default() }
    }

    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// Returns the topics that any of the patterns matches, sorted by id.
    pub fn matched_by(&self, patterns: &[&str]) -> impl Iterator<Item = &Arc<TopicInfo>> {
        let topics = self.topics.iter();
        topics.filter(|topic| patterns.iter().any(|it| pattern_matches(it, &topic.name)))
    }

    /// Returns whether any topic matches the pattern.
    pub fn has_match(&self, pattern: &str) -> bool {
        if let Some(known) = sync::lock(&self.has_match).get(pattern) {
            return *known;
        }
        let has_match = self.matched_by(&[pattern]).next().is_some();
        let mut known = sync::lock(&self.has_match);
        if known.len() >= REMEMBERED_PATTERNS_MAX {
            known.clear();
        }
        known.insert(pattern.into(), has_match);
        has_match
    }
}
