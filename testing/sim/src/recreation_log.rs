//! Observations of the recreated topic's clients, and the rules for them:
//!
//! - A topic whose creation was acknowledged stays until its own deletion is requested.
//! - A batch is in one place of one topic at most, and a place has one batch.
//! - A reader gets the records of one topic from offset 0 without gaps, and records of a later
//!   topic only after a notification.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use helix_checker::{BatchKey, payload};
use helix_client::{Batches, Error};
use helix_proto::log::v1::ErrorReason;

use crate::cluster::SimulatedMachine;
use crate::coverage::{CoverageMark, CoverageMarks};
use crate::recorder::Recorder;

/// Place of a batch: topic id, partition, first offset.
type BatchPlace = (u64, u32, u64);

/// Shared log of a run. Clones share it.
#[derive(Debug, Clone)]
pub struct RecreationLog {
    inner: Arc<Mutex<Inner>>,
    recorder: Recorder,
    marks: CoverageMarks,
}

#[derive(Debug, Default)]
struct Inner {
    /// Topics in the order of their creation.
    topics: Vec<TopicLife>,
    places: BTreeMap<BatchKey, BatchPlace>,
    contents: BTreeMap<BatchPlace, BatchKey>,
    /// All clients, and those that have used the last topic since it is the last one.
    clients: BTreeSet<u32>,
    active: BTreeSet<u32>,
    /// No further topic is created.
    is_quiet: bool,
    /// The last topic exists.
    is_settled: bool,
    violation: Option<String>,
}

/// Life of one topic.
#[derive(Debug)]
struct TopicLife {
    id: u64,
    is_deletion_requested: bool,
    is_deleted: bool,
}

impl RecreationLog {
    pub fn new(recorder: Recorder, marks: CoverageMarks) -> Self {
        Self { inner: Arc::default(), recorder, marks }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a broken rule. The first one ends the run.
    pub fn violate(&self, what: String) {
        self.recorder.note(&what);
        self.lock().violation.get_or_insert(what);
    }

    /// Registers a client, which must be able to use the last topic.
    pub fn register(&self, client: u32) {
        self.lock().clients.insert(client);
    }

    pub fn on_created(&self, id: u64) {
        self.recorder.note(&format!("recreated topic: {id} is created"));
        let mut inner = self.lock();
        let before = inner.topics.last().map_or(0, |topic| topic.id);
        inner.topics.push(TopicLife { id, is_deletion_requested: false, is_deleted: false });
        if before > 0 {
            self.marks.hit(CoverageMark::TopicRecreated);
        }
        drop(inner);
        if id <= before {
            self.violate(format!("topic {before} was deleted, and {id} was created after it"));
        }
    }

    pub fn on_deletion_requested(&self, id: u64) {
        self.recorder.note(&format!("recreated topic: deleting {id}"));
        if let Some(topic) = self.lock().topics.iter_mut().find(|topic| topic.id == id) {
            topic.is_deletion_requested = true;
        }
    }

    pub fn on_deleted(&self, id: u64) {
        self.recorder.note(&format!("recreated topic: {id} is deleted"));
        if let Some(topic) = self.lock().topics.iter_mut().find(|topic| topic.id == id) {
            topic.is_deleted = true;
        }
    }

    /// Returns the ids of all earlier topics.
    pub fn deleted(&self) -> Vec<u64> {
        self.lock().topics.iter().filter(|topic| topic.is_deleted).map(|topic| topic.id).collect()
    }

    /// Requests that no further topic is created.
    pub fn set_quiet(&self) {
        self.lock().is_quiet = true;
    }

    pub fn is_quiet(&self) -> bool {
        self.lock().is_quiet
    }

    /// Marks the current topic as the last one.
    pub fn settle(&self) {
        let mut inner = self.lock();
        inner.active.clear();
        inner.is_settled = true;
    }

    /// Returns whether the last topic exists and every client has used it.
    pub fn is_in_use(&self) -> bool {
        let inner = self.lock();
        inner.is_settled && inner.clients.is_subset(&inner.active)
    }

    /// Describes the clients that have not used the last topic, for people.
    pub fn describe(&self) -> String {
        let inner = self.lock();
        let idle: Vec<_> = inner.clients.difference(&inner.active).collect();
        format!("topics {:?}, settled: {}, idle clients: {idle:?}", inner.topics, inner.is_settled)
    }

    pub fn on_acked(&self, key: BatchKey, place: BatchPlace) {
        self.recorder.note(&format!("recreated topic: {key} is acked at {place:?}"));
        self.on_placed(key, place);
        self.on_active(key.producer, place.0);
    }

    fn on_placed(&self, key: BatchKey, place: BatchPlace) {
        let mut inner = self.lock();
        let known = *inner.places.entry(key).or_insert(place);
        let content = *inner.contents.entry(place).or_insert(key);
        drop(inner);
        if known != place {
            self.violate(format!("{key} is at {known:?} and at {place:?}"));
        }
        if content != key {
            self.violate(format!("{content} and {key} are at {place:?}"));
        }
    }

    fn on_active(&self, client: u32, topic_id: u64) {
        let mut inner = self.lock();
        if inner.topics.last().is_some_and(|last| last.id == topic_id) {
            inner.active.insert(client);
        }
    }

    /// Checks the topics of all running nodes, and returns the first broken rule.
    ///
    /// # Errors
    /// The broken rule.
    pub fn check(&self, machines: &[SimulatedMachine]) -> Result<(), String> {
        let inner = self.lock();
        if let Some(what) = &inner.violation {
            return Err(what.clone());
        }
        let alive = inner.topics.iter().filter(|topic| !topic.is_deletion_requested);
        for id in alive.map(|topic| topic.id) {
            for node in machines.iter().filter_map(SimulatedMachine::node) {
                if node.cluster().machine().read(|state| state.is_deleted(id)) {
                    return Err(format!("topic {id} is gone, but its deletion was not requested"));
                }
            }
        }
        Ok(())
    }
}

/// Position of a reader in a partition.
#[derive(Debug, Clone, Copy, Default)]
pub struct ReaderPosition {
    /// 0 before the first record.
    pub topic_id: u64,
    pub next: u64,
}

/// Checks what one reader gets.
#[derive(Debug)]
pub struct ReaderCheck {
    log: RecreationLog,
    reader: u32,
    pub positions: Vec<ReaderPosition>,
}

impl ReaderCheck {
    pub fn new(log: RecreationLog, reader: u32, partitions: u32) -> Self {
        log.register(reader);
        Self { log, reader, positions: vec![ReaderPosition::default(); partitions as usize] }
    }

    pub fn on_batches(&mut self, batches: &Batches) {
        let (reader, partition, topic_id) = (self.reader, batches.partition, batches.topic_id);
        let position = &mut self.positions[partition as usize];
        if position.topic_id == 0 {
            position.topic_id = topic_id;
        }
        if position.topic_id != topic_id {
            self.log.violate(format!(
                "reader {reader} of partition {partition} got from topic {} into {topic_id} \
                 without notice",
                position.topic_id
            ));
        }
        for stored in &batches.batches {
            let offset = stored.first_offset;
            match payload::read(&stored.batch.clone().unwrap_or_default()) {
                Ok((key, records)) if offset == position.next => {
                    position.next += u64::from(records);
                    self.log.on_placed(key, (topic_id, partition, offset));
                    self.log.on_active(reader, topic_id);
                }
                Ok((key, _)) => self.log.violate(format!(
                    "reader {reader} expected offset {} of partition {partition} of topic \
                     {topic_id}, and got {key} at {offset}",
                    position.next
                )),
                Err(what) => self.log.violate(format!("reader {reader} got {what}")),
            }
        }
    }

    /// A subscription says that it continues in another topic.
    pub fn on_restarted(&mut self, partition: u32, old_id: u64, new_id: u64) {
        let position = &mut self.positions[partition as usize];
        if position.topic_id != 0 && position.topic_id != old_id || new_id <= old_id {
            self.log.violate(format!(
                "reader {} is in {position:?}, but a notification moved it from topic {old_id} to \
                 {new_id}",
                self.reader
            ));
        }
        self.log.marks.hit(CoverageMark::ReaderToldOfRecreation);
        *position = ReaderPosition { topic_id: new_id, next: 0 };
    }

    /// Continues at the beginning of the later topic that an error names, if it names one.
    pub fn on_error(&mut self, error: &Error) {
        if error.is(ErrorReason::OffsetOutOfRange) {
            let reader = self.reader;
            self.log.violate(format!("reader {reader} of {:?}: {error}", self.positions));
        }
        let Some(recreated) = &error.recreated else { return };
        for position in &mut self.positions {
            if position.topic_id == recreated.expected_id && recreated.id > position.topic_id {
                self.log.marks.hit(CoverageMark::ReaderToldOfRecreation);
                *position = ReaderPosition { topic_id: recreated.id, next: 0 };
            }
        }
    }
}
