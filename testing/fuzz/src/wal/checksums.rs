//! Checksums of a log's files, by `docs/wal-format.md`. Updates the checksums of changed files, so
//! that the code behind them is reached. Payload checksums are not updated.

const BLOCK: usize = 4096;

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).map_or(0, |b| u32::from_le_bytes(b.try_into().unwrap()))
}

fn put(bytes: &mut [u8], at: usize, crc: u32) {
    bytes[at..at + 4].copy_from_slice(&crc.to_le_bytes());
}

/// Updates the checksums of a file, as far as it has the structure that its name implies.
pub(crate) fn update_checksums(name: &str, bytes: &mut [u8]) {
    if name == "state" {
        update_state(bytes);
    } else if name.ends_with(".seg") || name.ends_with(".cold") || name.ends_with(".new") {
        update_segment(bytes);
    }
}

fn update_state(bytes: &mut [u8]) {
    let len = u32_at(bytes, 16) as usize;
    if (24..=bytes.len()).contains(&len) {
        let crc = crc32fast::hash(&bytes[12..len]);
        put(bytes, 8, crc);
    }
}

fn update_segment(bytes: &mut [u8]) {
    if bytes.len() < 2 * BLOCK {
        return;
    }
    let crc = crc32fast::hash(&bytes[12..BLOCK]);
    put(bytes, 8, crc);
    update_groups(bytes);
    let trailer = bytes.len() / BLOCK * BLOCK - BLOCK;
    if bytes[trailer..].starts_with(b"HLXTRAIL") {
        update_footer(bytes, trailer);
    }
}

/// Updates all groups. Each has the checksum of the group before it.
fn update_groups(bytes: &mut [u8]) {
    let mut at = BLOCK;
    let mut before: Option<u32> = None;
    while at + BLOCK <= bytes.len() && bytes[at..].starts_with(b"HLXG") {
        let len = u32_at(bytes, at + 12) as usize;
        if len < 128 || at + len > bytes.len() {
            return;
        }
        let frames_crc = update_frames(&mut bytes[at..at + len]);
        put(bytes, at + 36, frames_crc);
        if let Some(before) = before {
            put(bytes, at + 56, before);
        }
        let crc = crc32fast::hash(&bytes[at + 8..at + 128]);
        put(bytes, at + 4, crc);
        before = Some(crc);
        at += len.next_multiple_of(BLOCK);
    }
}

/// Updates the frames of a group. Returns the checksum over their checksums.
fn update_frames(group: &mut [u8]) -> u32 {
    let mut crcs = crc32fast::Hasher::new();
    let mut at = 128;
    for _ in 0..u32_at(group, 32) {
        let (head, payload) = (u32_at(group, at + 20) as usize, u32_at(group, at + 48) as usize);
        let covered = at.checked_add(64).and_then(|at| at.checked_add(head));
        let Some(end) = covered.filter(|end| *end <= group.len()) else { break };
        let crc = crc32fast::hash(&group[at + 4..end]);
        put(group, at, crc);
        crcs.update(&crc.to_le_bytes());
        at = (end + payload).next_multiple_of(8);
    }
    crcs.finalize()
}

fn update_footer(bytes: &mut [u8], trailer: usize) {
    let start = u32_at(bytes, trailer + 72) as usize;
    if !start.is_multiple_of(BLOCK) || start > trailer {
        let crc = crc32fast::hash(&bytes[trailer + 12..trailer + BLOCK]);
        return put(bytes, trailer + 8, crc);
    }
    for page in (start..trailer).step_by(BLOCK) {
        let crc = crc32fast::hash(&bytes[page + 4..page + BLOCK]);
        put(bytes, page, crc);
    }
    let directory = start.saturating_add(u32_at(bytes, trailer + 104) as usize * BLOCK);
    let pages = u32_at(bytes, trailer + 108) as usize * BLOCK;
    if let Some(directory) = bytes.get(directory..directory.saturating_add(pages)) {
        let crc = crc32fast::hash(directory);
        put(bytes, trailer + 116, crc);
    }
    let crc = crc32fast::hash(&bytes[trailer + 12..trailer + BLOCK]);
    put(bytes, trailer + 8, crc);
}
