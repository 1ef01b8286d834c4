//go:build unix

package main

import (
	"os/exec"
	"syscall"
)

// ownGroup puts a program into a process group of its own, so that an interrupt typed at the terminal does not reach it,
// and so that it can be ended together with what it has started.
func ownGroup(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
}

// endGroup ends what a program that has been cut off left behind.
func endGroup(cmd *exec.Cmd) {
	if cmd.Process != nil {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // there may be nobody left
	}
}
