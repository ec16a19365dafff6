//! `helix top`: a live view of nodes, shards, topics, groups and slow calls, on the whole terminal.
//! Asks every node once a second; nothing is asked while the view is paused.

mod rates;
mod view;

use std::io::{IsTerminal, stdin, stdout};
use std::time::Duration;

use anyhow::Context;
use futures_util::future::join_all;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::args::{GlobalArgs, TopArgs};
use crate::connect::connect;
use crate::exit::{CliError, Exit};
use rates::Sample;
use view::{Section, TopView};

/// Partitions above which topics are not listed: their state is asked for each second.
const PARTITIONS_MAX: u64 = 5_000;

pub(crate) async fn run(global: &GlobalArgs, args: &TopArgs) -> anyhow::Result<()> {
    if !stdout().is_terminal() || !stdin().is_terminal() {
        let failure = CliError::new(Exit::Usage, "helix top needs a terminal");
        return Err(failure.hint("helix cluster nodes\nhelix cluster shards").into());
    }
    // Fails before the terminal changes.
    let client = connect(global).await?;
    let admin = client.admin();
    let mut terminal = ratatui::try_init().context("set up the terminal")?;
    let outcome = tokio::select! {
        outcome = show(&mut terminal, global, &admin, args.interval) => outcome,
        () = crate::interrupt::interrupted() => Ok(()),
        _ = crate::stdout_reader::gone() => Ok(()),
    };
    ratatui::restore();
    outcome
}

/// State of the view that keys change.
#[derive(Debug, Default)]
struct Controls {
    section: Section,
    /// First row that is shown of the section.
    scroll: usize,
    is_paused: bool,
    shows_help: bool,
}

/// Effect of a key.
#[derive(Debug, PartialEq, Eq)]
enum KeyEffect {
    Quit,
    Redraw,
    Nothing,
}

impl Controls {
    /// Applies a key; the keys are those of htop and less.
    fn apply(&mut self, key: KeyEvent) -> KeyEffect {
        if key.kind == KeyEventKind::Release {
            return KeyEffect::Nothing;
        }
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c') if is_control => return KeyEffect::Quit,
            KeyCode::Char('q') | KeyCode::F(10) => return KeyEffect::Quit,
            KeyCode::Esc if self.shows_help => self.shows_help = false,
            KeyCode::Esc => return KeyEffect::Quit,
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.shows_help = !self.shows_help,
            KeyCode::Char(' ' | 'p') => self.is_paused = !self.is_paused,
            KeyCode::Tab | KeyCode::Right => self.select(self.section.next()),
            KeyCode::BackTab | KeyCode::Left => self.select(self.section.previous()),
            KeyCode::Down | KeyCode::Char('j') => self.scroll = self.scroll.saturating_add(1),
            KeyCode::Up | KeyCode::Char('k') => self.scroll = self.scroll.saturating_sub(1),
            KeyCode::PageDown => self.scroll = self.scroll.saturating_add(10),
            KeyCode::PageUp => self.scroll = self.scroll.saturating_sub(10),
            KeyCode::Home => self.scroll = 0,
            _ => return KeyEffect::Nothing,
        }
        KeyEffect::Redraw
    }

    fn select(&mut self, section: Section) {
        self.section = section;
        self.scroll = 0;
    }
}

async fn show(
    terminal: &mut DefaultTerminal,
    global: &GlobalArgs,
    admin: &helix_client::Admin,
    period: Duration,
) -> anyhow::Result<()> {
    let mut keys = terminal_events();
    let mut controls = Controls::default();
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut newest: Option<Sample> = None;
    let mut view = TopView::waiting(&global.addr.join(","));
    loop {
        terminal.draw(|frame| view::draw(frame, &view, &mut controls)).context("draw the view")?;
        tokio::select! {
            event = keys.recv() => match event {
                Some(Event::Key(key)) => match controls.apply(key) {
                    KeyEffect::Quit => return Ok(()),
                    KeyEffect::Redraw | KeyEffect::Nothing => {}
                },
                Some(_) => {}
                // The terminal is gone.
                None => return Ok(()),
            },
            sample = next_sample(&mut ticks, global, admin), if !controls.is_paused => {
                match sample {
                    Ok(sample) => {
                        view = TopView::new(newest.as_ref(), &sample);
                        newest = Some(sample);
                    }
                    Err(error) => view = view.silent(&format!("{error:#}")),
                }
            }
        }
    }
}

async fn next_sample(
    ticks: &mut tokio::time::Interval,
    global: &GlobalArgs,
    admin: &helix_client::Admin,
) -> anyhow::Result<Sample> {
    ticks.tick().await;
    let snapshot = super::cluster::snapshot::ClusterSnapshot::take(global).await?;
    let partitions = snapshot.topic_counts().1.unwrap_or(0);
    let nodes = snapshot.nodes.iter().filter(|node| node.report.is_ok());
    let slow = join_all(nodes.map(async |node| {
        // A node of an earlier version has no such call.
        let calls = admin.slow_calls(&node.endpoint).await.unwrap_or_default();
        calls.into_iter().map(|call| (node.node_id, call))
    }));
    let (topics, groups, slow) = tokio::join!(
        async {
            match partitions <= PARTITIONS_MAX {
                true => admin.topics("").await.ok(),
                false => None,
            }
        },
        async { admin.groups().await.ok() },
        slow,
    );
    let mut slow: Vec<_> = slow.into_iter().flatten().collect();
    slow.sort_by_key(|(_, call)| std::cmp::Reverse(view::took(call.duration)));
    Ok(Sample { at: Instant::now(), snapshot, topics, groups, slow })
}

/// Reads the events of the terminal in a thread of its own, because the read blocks.
fn terminal_events() -> mpsc::UnboundedReceiver<Event> {
    let (sender, events) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            if sender.send(event).is_err() {
                return;
            }
        }
    });
    events
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_those_of_htop() {
        let mut controls = Controls::default();
        let press = |code| KeyEvent::new(code, KeyModifiers::NONE);
        assert_eq!(controls.apply(press(KeyCode::Char(' '))), KeyEffect::Redraw);
        assert!(controls.is_paused);
        controls.apply(press(KeyCode::PageDown));
        assert_eq!(controls.scroll, 10);
        controls.apply(press(KeyCode::Tab));
        assert_eq!((controls.section, controls.scroll), (Section::Shards, 0));
        controls.apply(press(KeyCode::F(1)));
        assert!(controls.shows_help);
        controls.apply(press(KeyCode::Esc));
        assert!(!controls.shows_help);
        for code in [KeyCode::Char('q'), KeyCode::F(10), KeyCode::Esc] {
            assert_eq!(controls.apply(press(code)), KeyEffect::Quit);
        }
        assert_eq!(controls.apply(press(KeyCode::Char('x'))), KeyEffect::Nothing);
    }
}
