package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// What processes have used, from /proc: Linux only.

// errNoProc says why there is no figure elsewhere.
var errNoProc = errors.New("this workload reads /proc, which only Linux has")

// cpuTime is the processor time that a process has used, all its threads together.
func cpuTime(pid int) (time.Duration, error) {
	// In nanoseconds, where the kernel keeps it; /proc/PID/stat counts in hundredths of a second.
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil || len(threads) == 0 {
		return 0, errNoProc
	}
	var sum time.Duration
	for _, file := range threads {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // it has ended
		}
		var ns int64
		if _, err := fmt.Sscan(string(text), &ns); err != nil {
			return 0, err
		}
		sum += time.Duration(ns)
	}
	return sum, nil
}

// childrenOf are the processes that a process has started.
func childrenOf(pid int) (children []int, err error) {
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil || len(stats) == 0 {
		return nil, errNoProc
	}
	for _, file := range stats {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // it has ended
		}
		// pid (name) state ppid: the name may hold anything.
		_, rest, _ := strings.Cut(string(text[strings.LastIndexByte(string(text), ')')+1:]), " ")
		if f := strings.Fields(rest); len(f) > 1 && f[1] == strconv.Itoa(pid) {
			child, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
			if err != nil {
				return nil, err
			}
			children = append(children, child)
		}
	}
	return children, nil
}

// residentMemory is how much memory this program has now, in MB.
func residentMemory() (float64, error) {
	text := procField("/proc/self/status", "VmRSS")
	kB, err := strconv.ParseFloat(strings.TrimSuffix(text, " kB"), 64)
	if err != nil {
		return 0, errNoProc
	}
	return kB / 1024, nil
}
