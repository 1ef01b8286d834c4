//go:build unix && !linux

package pgtest

import (
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// serverAttr returns the attributes of the server process. Only Linux can tie
// the life of a process to that of its parent: here a server survives the
// SIGKILL of the process that started it.
func serverAttr(u *account) *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Setpgid: true}
	attr.Credential = u.credential()
	return attr
}

// helperAttr is for short-lived helpers.
func helperAttr(u *account) *syscall.SysProcAttr { return serverAttr(u) }

// processes lists all processes of the machine.
func processes() ([]processInfo, error) {
	out, err := exec.Command("ps", "-axo", "pid=,ppid=,state=,comm=").Output()
	if err != nil {
		return nil, err
	}
	var list []processInfo
	for line := range strings.Lines(string(out)) {
		fields := strings.Fields(line)
		if len(fields) < 4 {
			continue
		}
		pid, err1 := strconv.Atoi(fields[0])
		ppid, err2 := strconv.Atoi(fields[1])
		if err1 != nil || err2 != nil {
			continue
		}
		list = append(list, processInfo{
			pid:     pid,
			ppid:    ppid,
			command: strings.TrimSuffix(filepath.Base(fields[3]), ":"),
			zombie:  strings.HasPrefix(fields[2], "Z"),
			stopped: strings.HasPrefix(fields[2], "T"),
		})
	}
	return list, nil
}
