//! Committed offsets of a group, and the history of each.
//!
//! # Memory
//! A row has 80 bytes: number, kind and flags (8), offset, previous offset and two times (32), the
//! place of the last commit (16), the name of the committer, which its rows share (16), and a
//! pointer (8). A vector of rows has an eighth to spare at most, so an offset takes 90 bytes. Only
//! rows with metadata or with earlier events have their own block: 40 bytes, the metadata, and 48
//! bytes for each event. A topic takes 48 bytes, and its name with 16 more.

use std::sync::Arc;

use super::order::CommitPlace;
use super::sorted::SortedMap;
use super::{OFFSET_HISTORY_MAX, OffsetUpdate, PartitionKey};

/// Estimated bytes of an encoded row, of an earlier event and of a named topic, without texts.
const ROW_BYTES: usize = 60;
const EVENT_BYTES: usize = 40;
const NAMED_TOPIC_BYTES: usize = 12;

/// A growing vector reserves one part in this many of its rows, so that single insertions move few
/// bytes.
const SPARE_PART: usize = 8;

/// Rows of all topics of a group.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct OffsetTable {
    topics: SortedMap<u64, TopicRows>,
    /// Rows of all topics.
    len: usize,
    /// Estimated bytes of the rows and the topics' names in a checkpoint.
    bytes: usize,
}

/// Rows of one topic.
#[derive(Debug, Clone, PartialEq, Eq)]
struct TopicRows {
    name: Arc<str>,
    /// Sorted by their numbers.
    rows: Vec<CommittedRow>,
}

/// Committed offset of a partition, and its last changes.
///
/// The last event is stored in the fields of the row: it ends at the current offset and at the time
/// of the last change. Each event begins where the one before it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommittedRow {
    number: u32,
    kind: OffsetEventKind,
    has_offset: bool,
    had_offset: bool,
    offset: u64,
    from: u64,
    since_us: u64,
    changed_us: u64,
    /// Place of the last change, if that is a commit.
    place: CommitPlace,
    by: CommittedBy,
    more: Option<Box<RowExtra>>,
}

/// Member id or text of the seek that changed an offset; `None` if empty.
pub(super) type CommittedBy = Option<Arc<str>>;

/// Parts that most rows do not have.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct RowExtra {
    metadata: Box<str>,
    /// Events before the last one, oldest first.
    earlier: Vec<EarlierEvent>,
}

/// An event that is not the last one.
#[derive(Debug, Clone, PartialEq, Eq)]
struct EarlierEvent {
    kind: OffsetEventKind,
    had_offset: bool,
    from: u64,
    since_us: u64,
    until_us: u64,
    by: CommittedBy,
}

/// A change of a committed offset. Commits of one member in a row are one event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OffsetEvent<'a> {
    pub kind: OffsetEventKind,
    /// The member that committed, or the text of the seek.
    pub by: &'a str,
    pub from: Option<u64>,
    pub to: Option<u64>,
    pub since_us: u64,
    pub until_us: u64,
}

/// Kind of an [`OffsetEvent`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OffsetEventKind {
    Commit,
    Seek,
    Undo,
}

/// Origin of a change of offsets.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowChange<'a> {
    pub(super) kind: OffsetEventKind,
    pub(super) by: &'a CommittedBy,
    pub(super) at_us: u64,
    pub(super) place: CommitPlace,
}

/// Reserves capacity for `count` more rows, with little to spare.
fn reserve(rows: &mut Vec<CommittedRow>, count: usize) {
    if rows.capacity() - rows.len() < count {
        rows.reserve_exact(count.max(rows.len() / SPARE_PART));
    }
}

/// Converts a text to its stored form.
pub(super) fn committed_by(by: &str) -> CommittedBy {
    (!by.is_empty()).then(|| by.into())
}

/// Estimates the bytes of a topic's name in a checkpoint.
pub(super) fn named_topic_len(name: &str) -> usize {
    NAMED_TOPIC_BYTES + name.len()
}

impl OffsetTable {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Estimates the bytes of the table in a checkpoint.
    pub(super) fn estimated_len(&self) -> usize {
        self.bytes
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (PartitionKey, &CommittedRow)> {
        self.topics.iter().flat_map(|(topic_id, topic)| {
            let topic_id = *topic_id;
            topic.rows.iter().map(move |row| (PartitionKey { topic_id, number: row.number }, row))
        })
    }

    /// Rows of one topic, in the order of their numbers.
    pub(super) fn of_topic(&self, topic_id: u64) -> &[CommittedRow] {
        self.topics.get(&topic_id).map_or(&[][..], |topic| topic.rows.as_slice())
    }

    pub(super) fn get(&self, partition: PartitionKey) -> Option<&CommittedRow> {
        let rows = self.of_topic(partition.topic_id);
        let index = rows.binary_search_by_key(&partition.number, |row| row.number).ok()?;
        rows.get(index)
    }

    pub(super) fn has_topic(&self, topic_id: u64) -> bool {
        self.topics.get(&topic_id).is_some()
    }

    pub(super) fn names(&self) -> impl Iterator<Item = (u64, &Arc<str>)> {
        self.topics.iter().map(|(topic_id, topic)| (*topic_id, &topic.name))
    }

    /// Adds a topic with its name, unless the table has the topic.
    pub(super) fn name(&mut self, topic_id: u64, name: &str) {
        self.topics.get_or_insert_with(topic_id, || {
            self.bytes += named_topic_len(name);
            TopicRows { name: name.into(), rows: Vec::new() }
        });
    }

    /// Stores offsets of a topic that [`Self::name`] has added.
    pub(super) fn store(&mut self, topic_id: u64, updates: &[OffsetUpdate], change: RowChange<'_>) {
        let Some(topic) = self.topics.get_mut(&topic_id) else { return };
        let rows = &mut topic.rows;
        let mut sorted: Vec<&OffsetUpdate> = updates.iter().collect();
        sorted.sort_by_key(|update| update.number);
        let mut new: Vec<CommittedRow> = Vec::new();
        for update in sorted {
            let is_repeated = new.last().is_some_and(|row| row.number == update.number);
            let found = rows.binary_search_by_key(&update.number, |row| row.number);
            let row = match found {
                Ok(index) => rows.get_mut(index),
                Err(_) if is_repeated => new.last_mut(),
                Err(_) => None,
            };
            match row {
                Some(row) => {
                    self.bytes -= row.estimated_len();
                    row.record(change, update.offset);
                    row.set_metadata(&update.metadata);
                    self.bytes += row.estimated_len();
                }
                None => {
                    let mut row = CommittedRow::new(update.number, change, update.offset);
                    row.set_metadata(&update.metadata);
                    self.bytes += row.estimated_len();
                    new.push(row);
                }
            }
        }
        if new.is_empty() {
            return;
        }
        self.len += new.len();
        reserve(rows, new.len());
        rows.extend(new);
        // The sort finds two runs and merges them.
        rows.sort_by_key(|row| row.number);
    }

    /// Adds a row of a checkpoint. Returns what is wrong with it, if anything.
    pub(super) fn restore(&mut self, topic_id: u64, row: CommittedRow) -> Result<(), &'static str> {
        let topic = self.topics.get_mut(&topic_id).ok_or("a topic has no name")?;
        match topic.rows.binary_search_by_key(&row.number, |known| known.number) {
            Ok(_) => Err("duplicate offset"),
            Err(index) => {
                reserve(&mut topic.rows, 1);
                self.bytes += row.estimated_len();
                topic.rows.insert(index, row);
                self.len += 1;
                Ok(())
            }
        }
    }

    /// Reserves capacity for the rows of a checkpoint.
    pub(super) fn reserve(&mut self, topic_id: u64, count: usize) {
        if let Some(topic) = self.topics.get_mut(&topic_id) {
            topic.rows.reserve_exact(count);
        }
    }

    /// Removes a topic. Returns its name, and whether it had an offset.
    pub(super) fn remove(&mut self, topic_id: u64) -> Option<(Arc<str>, bool)> {
        let TopicRows { name, rows } = self.topics.remove(&topic_id)?;
        self.len -= rows.len();
        self.bytes -= rows.iter().map(CommittedRow::estimated_len).sum::<usize>();
        self.bytes -= named_topic_len(&name);
        Some((name, rows.iter().any(|row| row.has_offset)))
    }
}

impl CommittedRow {
    fn new(number: u32, change: RowChange<'_>, offset: Option<u64>) -> Self {
        let RowChange { kind, by, at_us, place } = change;
        Self {
            number,
            kind,
            has_offset: offset.is_some(),
            had_offset: false,
            offset: offset.unwrap_or_default(),
            from: 0,
            since_us: at_us,
            changed_us: at_us,
            place,
            by: by.clone(),
            more: None,
        }
    }

    /// Restores a row from its parts in a checkpoint; `events` are oldest first. Returns what is
    /// wrong with them, if anything.
    pub(super) fn from_parts(
        number: u32,
        offset: Option<u64>,
        changed_us: u64,
        place: CommitPlace,
        metadata: &str,
        mut events: Vec<(OffsetEvent<'_>, CommittedBy)>,
    ) -> Result<Self, &'static str> {
        if events.len() > OFFSET_HISTORY_MAX {
            return Err("a history is too long");
        }
        let follow = events.windows(2).all(|pair| pair[0].0.to == pair[1].0.from);
        let Some((last, by)) = events.pop() else { return Err("an offset has no history") };
        if !follow || last.to != offset || last.until_us != changed_us {
            return Err("a history does not lead to its offset");
        }
        let OffsetEvent { kind, from, since_us, .. } = last;
        // `collect` would reuse the larger allocation of `events`.
        let mut earlier = Vec::with_capacity(events.len());
        earlier.extend(events.into_iter().map(|(event, by)| EarlierEvent {
            kind: event.kind,
            had_offset: event.from.is_some(),
            from: event.from.unwrap_or_default(),
            since_us: event.since_us,
            until_us: event.until_us,
            by,
        }));
        let mut row = Self {
            number,
            kind,
            has_offset: offset.is_some(),
            had_offset: from.is_some(),
            offset: offset.unwrap_or_default(),
            from: from.unwrap_or_default(),
            since_us,
            changed_us,
            place,
            by,
            more: None,
        };
        if !earlier.is_empty() {
            row.more = Some(Box::new(RowExtra { earlier, ..RowExtra::default() }));
        }
        row.set_metadata(metadata);
        Ok(row)
    }

    /// Returns the next offset to read; `None` if an undo has removed it.
    pub fn offset(&self) -> Option<u64> {
        self.has_offset.then_some(self.offset)
    }

    /// Returns the place of the last change, if that is a commit of this member.
    ///
    /// The empty id means a commit without a member.
    pub(super) fn place_of(&self, member_id: &str) -> Option<CommitPlace> {
        let is_of = self.by.as_deref().unwrap_or_default() == member_id;
        (self.kind == OffsetEventKind::Commit && is_of).then_some(self.place)
    }

    pub(super) fn place(&self) -> CommitPlace {
        self.place
    }

    /// Returns whether the row has the offset and the metadata of an update.
    pub(super) fn is_set_to(&self, update: &OffsetUpdate) -> bool {
        self.offset() == update.offset && self.metadata() == update.metadata
    }

    pub fn metadata(&self) -> &str {
        self.more.as_ref().map_or("", |more| &*more.metadata)
    }

    /// Returns the time of the last change, in µs since the Unix epoch.
    pub fn changed_us(&self) -> u64 {
        self.changed_us
    }

    fn earlier(&self) -> &[EarlierEvent] {
        self.more.as_ref().map_or(&[][..], |more| more.earlier.as_slice())
    }

    fn from(&self) -> Option<u64> {
        self.had_offset.then_some(self.from)
    }

    /// Returns the last changes, oldest first.
    pub fn history(&self) -> impl DoubleEndedIterator<Item = OffsetEvent<'_>> {
        let earlier = self.earlier();
        let ends = earlier.iter().skip(1).map(EarlierEvent::from).chain([self.from()]);
        let ends: Vec<Option<u64>> = ends.collect();
        let events = earlier.iter().zip(ends).map(|(event, to)| OffsetEvent {
            kind: event.kind,
            by: event.by.as_deref().unwrap_or_default(),
            from: event.from(),
            to,
            since_us: event.since_us,
            until_us: event.until_us,
        });
        events.chain([OffsetEvent {
            kind: self.kind,
            by: self.by.as_deref().unwrap_or_default(),
            from: self.from(),
            to: self.offset(),
            since_us: self.since_us,
            until_us: self.changed_us,
        }])
    }

    /// Returns the offset before the last seek or undo; `None` if the history has none.
    pub fn before_last_seek(&self) -> Option<Option<u64>> {
        let is_seek = |event: &OffsetEvent<'_>| event.kind != OffsetEventKind::Commit;
        self.history().rev().find(is_seek).map(|event| event.from)
    }

    /// Estimates the bytes of the row in a checkpoint.
    fn estimated_len(&self) -> usize {
        let text = |by: &CommittedBy| by.as_deref().map_or(0, str::len);
        let earlier = self.earlier().iter().map(|event| EVENT_BYTES + text(&event.by));
        ROW_BYTES + text(&self.by) + self.metadata().len() + earlier.sum::<usize>()
    }

    fn record(&mut self, change: RowChange<'_>, to: Option<u64>) {
        let RowChange { kind, by, at_us, place } = change;
        // Proposers' clocks may differ, but times in the history never go back.
        let at_us = at_us.max(self.changed_us);
        let continues = kind == OffsetEventKind::Commit && self.kind == kind && self.by == *by;
        if !continues {
            let last = EarlierEvent {
                kind: self.kind,
                had_offset: self.had_offset,
                from: self.from,
                since_us: self.since_us,
                until_us: self.changed_us,
                by: std::mem::replace(&mut self.by, by.clone()),
            };
            let earlier = &mut self.more.get_or_insert_default().earlier;
            if earlier.len() + 1 >= OFFSET_HISTORY_MAX {
                earlier.remove(0);
            }
            // Most rows keep few events, and a group may have many rows.
            earlier.reserve_exact(1);
            earlier.push(last);
            (self.kind, self.since_us) = (kind, at_us);
            (self.had_offset, self.from) = (self.has_offset, self.offset);
        }
        (self.has_offset, self.offset) = (to.is_some(), to.unwrap_or_default());
        (self.changed_us, self.place) = (at_us, place);
    }

    fn set_metadata(&mut self, metadata: &str) {
        if self.metadata() == metadata {
            return;
        }
        let more = self.more.get_or_insert_default();
        more.metadata = metadata.into();
        if more.metadata.is_empty() && more.earlier.is_empty() {
            self.more = None;
        }
    }

    /// Bytes that the row takes beside its text and the names that rows share.
    #[cfg(test)]
    pub(super) fn memory(&self) -> usize {
        let block = |more: &RowExtra| {
            size_of::<RowExtra>() + more.earlier.capacity() * size_of::<EarlierEvent>()
        };
        size_of::<Self>() + self.more.as_deref().map_or(0, block)
    }
}

impl EarlierEvent {
    fn from(&self) -> Option<u64> {
        self.had_offset.then_some(self.from)
    }
}
