//! Tests of the program on a terminal: prompts, colours, tables and records. The terminals are
//! pseudo-terminals; a width is not set, so it is 80 columns.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, ChildStderr, Stdio};

use rustix::process::Signal;
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};

use crate::harness::{ServerProcess, command, signal};

/// A pseudo-terminal. What is written to `user` is typed, and what is read from it is shown.
struct Terminal {
    user: File,
    program: OwnedFd,
}

impl Terminal {
    fn open() -> Self {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let user = openpt(flags).unwrap();
        unlockpt(&user).unwrap();
        let program = ioctl_tiocgptpeer(&user, flags).unwrap();
        Self { user: user.into(), program }
    }

    /// Returns the program's side, as a standard stream of a child.
    fn stdio(&self) -> Stdio {
        self.program.try_clone().unwrap().into()
    }

    /// Returns everything that is shown until the program closes its side.
    fn read_to_end(self) -> String {
        let Self { mut user, program } = self;
        drop(program);
        let mut shown = Vec::new();
        let mut piece = [0; 4096];
        // The end is an error.
        while let Ok(bytes @ 1..) = user.read(&mut piece) {
            shown.extend_from_slice(&piece[..bytes]);
        }
        String::from_utf8(shown).unwrap().replace('\r', "")
    }
}

/// Returns what a command shows on a terminal.
fn shown(node: &ServerProcess, args: &[&str], environment: &[(&str, &str)]) -> String {
    let terminal = Terminal::open();
    let mut command = command(&[args, &["--addr", node.address()]].concat());
    command.env("TERM", "xterm").env_remove("COLUMNS").envs(environment.iter().copied());
    command.stdin(Stdio::null()).stdout(terminal.stdio()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    // It has a copy of the program's side.
    drop(command);
    let shown = terminal.read_to_end();
    assert!(child.wait().unwrap().success(), "{args:?}: {shown}");
    shown
}

/// A command that waits for a confirmation.
struct Prompt {
    child: Child,
    terminal: Terminal,
    stderr: ChildStderr,
}

impl Prompt {
    /// Starts a command and waits until it asks.
    fn of(node: &ServerProcess, args: &[&str]) -> Self {
        let terminal = Terminal::open();
        let mut command = command(&[args, &["--addr", node.address()]].concat());
        command.stdin(terminal.stdio()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut stderr = child.stderr.take().unwrap();
        let mut said = Vec::new();
        let mut byte = [0];
        while !said.ends_with(b"to confirm: ") {
            assert_eq!(stderr.read(&mut byte).unwrap(), 1, "{}", String::from_utf8_lossy(&said));
            said.push(byte[0]);
        }
        Self { child, terminal, stderr }
    }

    /// Types an answer and returns the exit code.
    fn answer(mut self, text: &str) -> Option<i32> {
        self.terminal.user.write_all(text.as_bytes()).unwrap();
        self.child.wait().unwrap().code()
    }

    /// Interrupts the command and returns the exit code and what it wrote after the prompt.
    fn interrupt(mut self) -> (Option<i32>, String) {
        signal(&self.child, Signal::INT);
        let mut said = String::new();
        self.stderr.read_to_string(&mut said).unwrap();
        (self.child.wait().unwrap().code(), said)
    }
}

#[test]
fn prompts_end_with_ctrl_c_and_accept_only_the_name() {
    let node = ServerProcess::start();
    node.ok_with(&["produce", "default", "-p", "0"], "a\n");
    for args in
        [&["topic", "trim", "default", "--to", "latest"][..], &["topic", "delete", "default"]]
    {
        // The shell's prompt is on a line of its own.
        assert_eq!(Prompt::of(&node, args).interrupt(), (Some(130), "\n".to_owned()), "{args:?}");
        assert_eq!(Prompt::of(&node, args).answer("other\n"), Some(1), "{args:?}");
    }
    assert_eq!(node.ok(&["consume", "default"]), "a\n", "nothing was deleted");
    assert_eq!(Prompt::of(&node, &["topic", "delete", "default"]).answer("default\n"), Some(0));
    assert_eq!(node.ok(&["topic", "list"]), "");
}

#[test]
fn tables_fit_the_terminal_and_states_are_coloured() {
    let node = ServerProcess::start();
    for args in [
        &["cluster", "info"][..],
        &["cluster", "nodes"],
        &["cluster", "shards"],
        &["topic", "list"],
        &["topic", "describe", "default"],
        &["offsets", "default"],
        &["check"],
    ] {
        let plain = shown(&node, args, &[("NO_COLOR", "1")]);
        assert!(!plain.contains('\x1b'), "{args:?}: {plain:?}");
        for line in plain.lines() {
            assert!(line.chars().count() <= 80, "{args:?}: {plain}");
        }
    }
    let coloured = shown(&node, &["cluster", "shards"], &[]);
    assert!(coloured.contains("\x1b[32mleader"), "{coloured:?}");
}

#[test]
fn records_have_their_fields_on_a_terminal_and_values_in_a_pipe() {
    let node = ServerProcess::start();
    node.ok_with(&["produce", "default", "-p", "1", "-k", "the key"], "the value\n");
    let args = ["tail", "default", "-n", "1"];
    let table = shown(&node, &args, &[]);
    let line = table.lines().find(|line| line.contains("the value"));
    let line = line.unwrap_or_else(|| panic!("{table}"));
    assert!(line.contains("the key"), "{line}");
    let fields: Vec<_> = line.split_whitespace().collect();
    assert_eq!(fields[..2], ["1", "0"], "partition and offset: {line}");
    assert_eq!(node.ok(&args), "the value\n");
}
