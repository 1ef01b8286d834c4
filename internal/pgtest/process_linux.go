package pgtest

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// serverAttr returns the attributes of the server process: its own process
// group, so that an interrupt typed at a terminal reaches only the command that
// runs the server (which then stops the server in its own time), and SIGQUIT
// (immediate shutdown: the postmaster ends its backends and leaves) when the
// launching thread dies. The caller keeps that thread for the server's life.
func serverAttr(u *account) *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGQUIT}
	attr.Credential = u.credential()
	return attr
}

// helperAttr is for short-lived helpers that are launched and awaited on one
// locked thread.
func helperAttr(u *account) *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	attr.Credential = u.credential()
	return attr
}

// processes lists all processes of the machine that this one can see.
func processes() ([]processInfo, error) {
	names, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil, err
	}
	var list []processInfo
	for _, name := range names {
		// A process may end between the listing and the reading.
		data, err := os.ReadFile(name)
		if err != nil {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(name)))
		if err != nil {
			continue
		}
		// The command name, in parentheses, may itself hold blanks and
		// parentheses: the fields start after the last one.
		_, comm, _ := strings.Cut(string(data), "(")
		end := strings.LastIndexByte(comm, ')')
		if end < 0 {
			continue
		}
		fields := strings.Fields(comm[end+1:])
		if len(fields) < 20 {
			continue
		}
		ppid, err := strconv.Atoi(fields[1])
		if err != nil {
			continue
		}
		list = append(list, processInfo{
			pid:     pid,
			ppid:    ppid,
			command: comm[:end],
			start:   fields[19],
			zombie:  fields[0] == "Z" || fields[0] == "X",
			stopped: fields[0] == "T",
		})
	}
	return list, nil
}
