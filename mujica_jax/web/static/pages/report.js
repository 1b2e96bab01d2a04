export const title = "report";
export async function show(main) {}
