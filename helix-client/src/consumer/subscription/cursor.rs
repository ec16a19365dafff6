//! Positions of the partitions of a subscription.

use std::collections::HashMap;

use helix_proto::log::v1::{PartitionRecords, Watermarks};

use crate::consumer::{Batches, Position, ReadStart, decode};
use crate::error::{RecreatedTopic, Result};

/// Position of one partition in a subscription.
#[derive(Debug)]
pub(super) struct Cursor {
    /// Start of the next stream: an offset once the service has resolved the position.
    pub(super) start: ReadStart,
    /// Lowest offset that may be delivered next; `None` until the position is resolved by data.
    pub(super) next: Option<u64>,
    /// The cursor has moved to a recreated topic of the same name.
    has_restarted: bool,
}

impl Cursor {
    pub(super) fn new(start: ReadStart) -> Self {
        let next = match start.position {
            Position::Offset(offset) => Some(offset),
            _ => None,
        };
        Self { start, next, has_restarted: false }
    }

    /// Returns true if a stream from any node would start at the same record.
    pub(super) fn is_resolved(&self) -> bool {
        matches!(self.start.position, Position::Offset(_))
    }

    /// Returns true if data starts below the position, as when the service clamped the position.
    pub(super) fn is_above(&self, data: &PartitionRecords) -> bool {
        self.next.is_some_and(|next| data.start_offset < next)
    }

    pub(super) fn lacks_end(&self) -> bool {
        self.start.until.is_some() && !self.has_reached_end()
    }

    pub(super) fn has_reached_end(&self) -> bool {
        matches!((self.next, self.start.until), (Some(next), Some(until)) if next >= until)
    }

    /// Verifies the records of a message and advances past them.
    pub(super) fn on_data(&mut self, data: PartitionRecords) -> Result<Batches> {
        self.pin(data.topic_id)?;
        let batches = decode::batches(data, self.next, self.start.until)?;
        self.next = Some(batches.next_offset);
        self.start.position = Position::Offset(batches.next_offset);
        Ok(batches)
    }

    /// Resolves a position like "latest" to the current offset.
    ///
    /// Otherwise a reopened stream would start at a later "latest". Does not move a reader that has
    /// an offset: the high watermark may have advanced since.
    pub(super) fn on_caught_up(&mut self, watermarks: &Watermarks, topic_id: u64) -> Result<()> {
        self.pin(topic_id)?;
        if !matches!(self.start.position, Position::Offset(_)) {
            self.start.position = Position::Offset(watermarks.high_watermark);
        }
        Ok(())
    }

    /// Binds the cursor to the topic of the first message, and rejects data of other topics.
    fn pin(&mut self, topic_id: u64) -> Result<()> {
        decode::check_topic(&self.start.topic, self.start.topic_id, topic_id)?;
        if self.start.topic_id == 0 {
            self.start.topic_id = topic_id;
        }
        Ok(())
    }

    /// Moves to the beginning of the topic that has the name now. Returns false if the cursor is
    /// not in the old one.
    pub(super) fn restart(&mut self, recreated: &RecreatedTopic) -> bool {
        let RecreatedTopic { topic, id, .. } = recreated;
        let is_old = self.start.topic == *topic && self.start.topic_id != *id;
        // A cursor without an id is in no topic yet; its position holds for the new one.
        if !is_old || *id == 0 || self.start.topic_id == 0 {
            return false;
        }
        self.start.topic_id = *id;
        self.start.position = Position::Earliest;
        self.next = None;
        self.has_restarted = true;
        true
    }

    /// Returns true if the cursor has this topic name, and no topic id yet.
    pub(super) fn is_unbound(&self, topic: &str) -> bool {
        self.start.topic == topic && self.start.topic_id == 0
    }

    /// Returns true if a later topic of the name has too few partitions for this cursor.
    pub(super) fn is_absent(&self, topic_id: u64, partition_count: u32) -> bool {
        let expected_id = self.start.topic_id;
        let is_later = topic_id > expected_id || (topic_id == expected_id && self.has_restarted);
        expected_id != 0 && is_later && self.start.partition >= partition_count
    }
}

/// Finds the cursor of a partition.
pub(super) struct CursorIndex {
    by_topic: HashMap<String, HashMap<u32, usize>>,
}

impl CursorIndex {
    pub(super) fn new(cursors: &[Cursor]) -> Self {
        let mut by_topic: HashMap<String, HashMap<u32, usize>> = HashMap::new();
        for (index, Cursor { start, .. }) in cursors.iter().enumerate() {
            by_topic.entry(start.topic.clone()).or_default().insert(start.partition, index);
        }
        Self { by_topic }
    }

    pub(super) fn get(&self, topic: &str, partition: u32) -> Option<usize> {
        self.by_topic.get(topic)?.get(&partition).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cursor(position: Position, until: Option<u64>) -> Cursor {
        Cursor::new(ReadStart { until, ..ReadStart::new("orders", 0, position) })
    }

    #[test]
    fn cursor_continues_after_the_last_message() {
        let mut cursor = cursor(Position::Latest, Some(9));
        let data =
            PartitionRecords { start_offset: 5, next_offset: 7, ..PartitionRecords::default() };
        assert_eq!(cursor.on_data(data).unwrap().start_offset, 5);
        assert_eq!(cursor.start.position, Position::Offset(7));
        assert!(!cursor.has_reached_end());
        let data = PartitionRecords { next_offset: 9, ..PartitionRecords::default() };
        assert_eq!(cursor.on_data(data).unwrap().start_offset, 7);
        assert!(cursor.has_reached_end());
    }

    #[test]
    fn data_of_a_clamped_position_is_below_the_cursor() {
        let data = |start_offset| PartitionRecords { start_offset, ..PartitionRecords::default() };
        let at_seven = cursor(Position::Offset(7), Some(9));
        assert!(at_seven.is_above(&data(5)) && !at_seven.is_above(&data(7)));
        assert!(!cursor(Position::Latest, None).is_above(&data(0)));
    }

    #[test]
    fn catching_up_resolves_a_named_position_once() {
        let mut cursor = cursor(Position::Latest, None);
        cursor.on_caught_up(&Watermarks { log_start_offset: 0, high_watermark: 12 }, 4).unwrap();
        assert_eq!(cursor.start.position, Position::Offset(12));
        cursor.on_caught_up(&Watermarks { log_start_offset: 0, high_watermark: 20 }, 4).unwrap();
        assert_eq!(cursor.start.position, Position::Offset(12));
        // The start of the next data counts, not the reported high watermark.
        let data =
            PartitionRecords { start_offset: 10, next_offset: 14, ..PartitionRecords::default() };
        assert_eq!(cursor.on_data(data).unwrap().start_offset, 10);
    }

    #[test]
    fn cursor_stays_in_its_topic_until_it_restarts() {
        let mut cursor = cursor(Position::Latest, None);
        let data =
            |topic_id| PartitionRecords { next_offset: 7, topic_id, ..PartitionRecords::default() };
        cursor.on_data(data(4)).unwrap();
        assert_eq!(cursor.start.topic_id, 4);
        let error = cursor.on_data(data(6)).unwrap_err();
        let recreated = error.recreated.clone().unwrap();
        assert_eq!((recreated.expected_id, recreated.id), (4, 6));
        assert!(
            !cursor.restart(&RecreatedTopic { topic: "other".to_owned(), ..recreated.clone() })
        );
        assert_eq!(cursor.start.position, Position::Offset(7));
        assert!(cursor.restart(&recreated));
        assert_eq!((cursor.start.position.clone(), cursor.next), (Position::Earliest, None));
        assert!(!cursor.restart(&recreated), "it is in the new one");
        cursor.on_data(data(6)).unwrap();
    }

    #[test]
    fn partition_is_absent_only_in_a_later_topic() {
        let mut cursor = Cursor::new(ReadStart::new("orders", 3, Position::Earliest).in_topic(4));
        assert!(!cursor.is_absent(4, 2), "a node may not know an added partition yet");
        assert!(!cursor.is_absent(3, 2) && cursor.is_absent(6, 2) && !cursor.is_absent(6, 4));
        let recreated = RecreatedTopic { topic: "orders".to_owned(), expected_id: 4, id: 6 };
        assert!(cursor.restart(&recreated) && cursor.is_absent(6, 2));
        assert!(!Cursor::new(ReadStart::new("orders", 3, Position::Earliest)).is_absent(6, 2));
    }

    #[test]
    fn finds_cursors_by_topic_and_partition() {
        let starts = [("a", 0), ("a", 1), ("b", 1)];
        let cursors: Vec<_> = starts
            .iter()
            .map(|&(topic, partition)| {
                Cursor::new(ReadStart::new(topic, partition, Position::Earliest))
            })
            .collect();
        let cursor_index = CursorIndex::new(&cursors);
        assert_eq!(cursor_index.get("a", 1), Some(1));
        assert_eq!(cursor_index.get("b", 1), Some(2));
        assert_eq!(cursor_index.get("b", 0), None);
        assert_eq!(cursor_index.get("c", 0), None);
    }
}
